"""How the model is trained: loss, decay and learning rate."""

import copy
import math
from itertools import pairwise

import pytest
import torch
from torch.nn import functional as F

from stability.config.schema import ModelConfig, OptimizerConfig
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.lightning_module import LanguageModel, learning_rate_factor


def _sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _module(**optimizer):
    config = ModelConfig(depth=1, width=16, heads=1, context=8, vocab_size=11)
    model = GPT(config, [_sdpa])
    initialise(model, 0)
    return LanguageModel(model, OptimizerConfig(**optimizer), steps=100)


@pytest.fixture
def quiet_log(monkeypatch):
    monkeypatch.setattr(LanguageModel, "log", lambda *args, **kwargs: None)


def test_learning_rate_climbs_then_falls_to_a_tenth():
    factors = [learning_rate_factor(step, 10, 100) for step in range(101)]
    assert factors[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)])
    assert factors[10] == 1.0
    assert factors[55] == pytest.approx(0.55), "half-way down the cosine"
    assert factors[100] == pytest.approx(0.1)
    assert all(a > b for a, b in pairwise(factors[10:]))


def test_learning_rate_without_warmup_or_past_the_end_is_defined():
    assert learning_rate_factor(0, 0, 100) == 1.0
    assert learning_rate_factor(500, 0, 100) == pytest.approx(0.1)
    assert learning_rate_factor(5, 5, 5) == 1.0


def test_matrices_decay_and_vectors_do_not():
    module = _module(weight_decay=0.3, lr=1e-2, betas=(0.8, 0.9), eps=1e-5, warmup_steps=4)
    configured = module.configure_optimizers()
    optimizer = configured["optimizer"]
    decays = {p: g["weight_decay"] for g in optimizer.param_groups for p in g["params"]}
    assert len(decays) == len(list(module.parameters()))
    for name, parameter in module.named_parameters():
        assert decays[parameter] == (0.3 if parameter.dim() >= 2 else 0.0), name
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 / 4), "first step of the warm-up"


def test_loss_is_the_cross_entropy_of_the_next_token(quiet_log):
    module = _module().double()
    tokens = torch.randint(0, 11, (3, 9), generator=torch.Generator().manual_seed(0))
    log_p = module.model(tokens[:, :-1]).log_softmax(-1)
    expected = -sum(
        log_p[row, at, tokens[row, at + 1]].item() for row in range(3) for at in range(8)
    ) / (3 * 8)
    loss = module.training_step(tokens, 0)
    assert loss.dtype == torch.float64
    assert loss.item() == pytest.approx(expected, rel=1e-12)
    assert abs(loss.item() - math.log(11)) < 0.1, "a new model knows nothing"


def test_loss_is_wide_even_when_the_logits_are_not(quiet_log):
    module = _module().bfloat16()
    assert module.training_step(torch.zeros(2, 9, dtype=torch.int64), 0).dtype == torch.float32


def _trained(steps, **optimizer):
    """Return what Lightning keeps in a checkpoint of the optimizer and its schedule."""
    module = _module(**optimizer)
    configured = module.configure_optimizers()
    own, schedule = configured["optimizer"], configured["lr_scheduler"]["scheduler"]
    for _ in range(steps):
        module.model(torch.zeros(1, 8, dtype=torch.int64)).square().sum().backward()
        own.step()
        schedule.step()
    return {"optimizer_states": [own.state_dict()], "lr_schedulers": [schedule.state_dict()]}


@pytest.mark.parametrize("name", ["adamw", "muon", "sgd"])
def test_its_own_settings_leave_a_checkpoint_as_it_is(name):
    checkpoint = _trained(7, name=name, warmup_steps=3)
    before = copy.deepcopy(checkpoint)
    _module(name=name, warmup_steps=3).settle(checkpoint)
    for saved, was in zip(checkpoint["optimizer_states"], before["optimizer_states"], strict=True):
        assert saved["param_groups"] == was["param_groups"]
    assert checkpoint["lr_schedulers"] == before["lr_schedulers"]


def test_other_settings_take_the_place_of_those_in_a_checkpoint():
    checkpoint = _trained(7, lr=1e-3, warmup_steps=3)
    chosen = {"lr": 4e-3, "betas": (0.5, 0.6), "eps": 1e-4, "weight_decay": 0.7}
    _module(**chosen, warmup_steps=20).settle(checkpoint)
    first, second = checkpoint["optimizer_states"][0]["param_groups"]
    for group, decay in ((first, 0.7), (second, 0.0)):
        assert (group["betas"], group["eps"]) == ((0.5, 0.6), 1e-4)
        assert (group["weight_decay"], group["initial_lr"]) == (decay, 4e-3)
        # the eighth of twenty updates of a warm-up
        assert group["lr"] == 4e-3 * (8 / 20)
    assert checkpoint["lr_schedulers"][0]["base_lrs"] == [4e-3, 4e-3]
    module = _module(**chosen, warmup_steps=20)
    restored = module.configure_optimizers()
    restored["optimizer"].load_state_dict(checkpoint["optimizer_states"][0])
    schedule = restored["lr_scheduler"]["scheduler"]
    schedule.load_state_dict(checkpoint["lr_schedulers"][0])
    schedule.step()
    assert restored["optimizer"].param_groups[0]["lr"] == 4e-3 * (9 / 20)


def test_the_state_of_another_optimizer_is_refused():
    with pytest.raises(ValueError, match="state is that of another optimizer"):
        _module(name="muon").settle(_trained(2, name="adamw"))
