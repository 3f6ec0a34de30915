"""The optimizers: each is what PyTorch's own classes do, and goes on from its state."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F
from torch.optim import SGD, AdamW, Muon

from attention_kernels import round_to
from attention_kernels.formats import format_named
from stability.config.schema import OPTIMIZERS, ModelConfig, OptimizerConfig
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.optimizers import SideBySide, build_optimizer

CONFIG = ModelConfig(depth=2, width=16, heads=2, context=8, vocab_size=11)
OWN = """
import torch

class Halving(torch.optim.Optimizer):
    def __init__(self, groups, lr, factor=0.5):
        super().__init__(groups, {"lr": lr, "factor": factor})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(group["factor"])

def no_optimizer(groups, lr):
    return "none"
"""


def _sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)


def _model():
    model = GPT(CONFIG, [_sdpa] * CONFIG.depth)
    initialise(model, 0)
    return model


def _train(model, optimizers, steps, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        tokens = torch.randint(0, 11, (3, 8), generator=generator)
        for optimizer in optimizers:
            optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        for optimizer in optimizers:
            optimizer.step()


def _by_torch(model, chosen):
    """Return what PyTorch's classes make of the setting, written down a second time."""
    named = dict(model.named_parameters())
    blocks = {n for n, p in named.items() if n.startswith("blocks.") and p.dim() == 2}
    chosen_adam = {"lr": chosen.lr, "betas": chosen.betas, "eps": chosen.eps}
    given = {"adamw": set(), "sgd": set(), "muon": blocks}[chosen.name]
    matrices = [p for n, p in named.items() if p.dim() == 2 and n not in given]
    vectors = [p for p in named.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": chosen.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if chosen.name == "sgd":
        return [SGD(groups, lr=chosen.lr, momentum=chosen.momentum)]
    adam = AdamW(groups, **chosen_adam)
    if chosen.name == "adamw":
        return [adam]
    hidden = [named[name] for name in blocks]
    own = {"weight_decay": chosen.weight_decay, "momentum": chosen.momentum}
    return [Muon(hidden, lr=chosen.lr, adjust_lr_fn="match_rms_adamw", **own), adam]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_each_updates_as_pytorch_s_own_do(name):
    chosen = OptimizerConfig(
        name=name, lr=3e-3, betas=(0.8, 0.9), eps=1e-6, momentum=0.7, weight_decay=0.2
    )
    ours, theirs = _model(), _model()
    before = {n: p.detach().clone() for n, p in ours.named_parameters()}
    _train(ours, [build_optimizer(ours, chosen)], 4)
    _train(theirs, _by_torch(theirs, chosen), 4)
    for (n, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(a, b), n
        assert not torch.equal(a, before[n]), n


@pytest.mark.parametrize("setting", ["lr", "weight_decay", "betas", "eps", "momentum"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_setting_moves_the_weights_exactly_where_it_is_said_to_be_taken(name, setting):
    other = {"lr": 2e-3, "weight_decay": 0.7, "betas": (0.5, 0.6), "eps": 1e-2, "momentum": 0.3}
    trained = []
    for changes in ({}, {setting: other[setting]}):
        model = _model()
        chosen = OptimizerConfig(name=name, **changes)
        _train(model, [build_optimizer(model, chosen)], 3)
        trained.append(torch.cat([p.flatten() for p in model.parameters()]))
    is_taken = setting in ("lr", "weight_decay") or setting in OPTIMIZERS[name]
    assert torch.equal(*trained) != is_taken


@pytest.mark.parametrize("state", ["", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_goes_on_from_its_state_to_the_same_bits(name, state):
    chosen = OptimizerConfig(name=name, state=state)
    model = _model()
    optimizer = build_optimizer(model, chosen)
    _train(model, [optimizer], 3)
    resumed, saved = copy.deepcopy(model), copy.deepcopy(optimizer.state_dict())
    fresh = build_optimizer(resumed, chosen)
    fresh.load_state_dict(saved)
    _train(model, [optimizer], 3, seed=1)
    _train(resumed, [fresh], 3, seed=1)
    for (n, a), b in zip(model.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), n


def test_a_step_calls_its_closure_once_with_gradients_on():
    model, calls = _model(), []
    optimizer = build_optimizer(model, OptimizerConfig(name="muon"))
    assert isinstance(optimizer, SideBySide)

    def closure():
        calls.append(torch.is_grad_enabled())
        optimizer.zero_grad()
        loss = model(torch.zeros(1, 4, dtype=torch.int64)).logsumexp(-1).sum()
        loss.backward()
        return loss

    before = [p.detach().clone() for p in model.parameters()]
    assert optimizer.step(closure) > 0
    assert calls == [True]
    assert not all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_lies_on_the_grid_of_its_format_and_the_first_update_does_not_move(name):
    narrow, wide = (OptimizerConfig(name=name, state=state) for state in ("bf16", ""))
    models = [_model(), _model()]
    optimizers = [build_optimizer(m, c) for m, c in zip(models, (narrow, wide), strict=True)]
    for steps, is_same in ((1, True), (3, False)):
        for model, optimizer in zip(models, optimizers, strict=True):
            _train(model, [optimizer], steps)
        weights = [torch.cat([p.flatten() for p in m.parameters()]) for m in models]
        # the first update is computed before anything is stored
        assert torch.equal(*weights) == is_same
    grid = [_is_on_grid(o, "bf16") for o in optimizers]
    assert grid[0] == {True}
    assert False in grid[1], "nothing was rounded that would not lie there anyway"


def _is_on_grid(optimizer, name):
    values = [v for s in optimizer.state.values() for v in s.values() if v.dim()]
    return {torch.equal(v, round_to(v, format_named(name))) for v in values}


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_optimizers.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_an_optimizer_of_one_s_own_gets_groups_rate_and_options(own):
    model = _model()
    name = "own_optimizers:Halving"
    chosen = OptimizerConfig(name=name, lr=0.25, options={"factor": 0.75})
    optimizer = build_optimizer(model, chosen)
    assert [g["lr"] for g in optimizer.param_groups] == [0.25, 0.25]
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]
    before = model.token_embedding.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.token_embedding.weight, 0.75 * before)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "own_optimizers:Halvin"}, "optimizer.name must be .* nearest: Halving"),
        ({"name": "nowhere:At"}, "optimizer.name must be .* 'nowhere:At'; ModuleNotFoundError"),
        ({"name": "own_optimizers:no_optimizer"}, r"name a torch.optim.Optimizer, .* gives str"),
        ({"name": "own_optimizers:Halving", "options": {"no": 1}}, "unexpected keyword .*'no'"),
    ],
)
def test_an_optimizer_that_is_none_is_refused(own, changes, says):
    with pytest.raises(ValueError, match=says):
        build_optimizer(_model(), OptimizerConfig(**changes))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"name": "adam"}, "optimizer: name must be adamw, sgd, muon or MODULE:CLASS, got 'adam'"),
        ({"momentum": 1.0}, r"optimizer: momentum must be in \[0, 1\), got 1.0"),
        ({"state": "bf17"}, "optimizer: state: .*'bf17'"),
        ({"state": "fp64"}, "optimizer: state must be a format that FP32 holds, got 'fp64'"),
        ({"options": {"a": 1}}, "optimizer: options must be empty but for a class of one's own"),
    ],
)
def test_a_wrong_setting_is_named(changes, says):
    with pytest.raises(ValueError, match=says):
        replace(OptimizerConfig(), **changes)
