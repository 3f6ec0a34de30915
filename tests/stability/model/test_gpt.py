"""The decoder: its size, its causality, what it owns and what it leaves alone."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from torch.nn import functional as F

from stability.config.convert import from_dict
from stability.config.schema import ModelConfig
from stability.model.decoder import build_decoder
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise

PRESETS = Path(__file__).parents[3] / "configs" / "model"
TINY = ModelConfig(depth=2, width=32, heads=4, kv_heads=2, context=12, vocab_size=17)


def _sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def _tokens(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 17, (2, length), generator=generator)


def _model(config=TINY, attention=_sdpa):
    model = GPT(replace(config, init="xavier"), [attention] * config.depth)
    initialise(model, 0)
    return model


def test_dropout_drops_while_training_alone_and_as_often_as_it_says():
    model, plain, tokens = _model(replace(TINY, dropout=0.5)), _model(), _tokens(12)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    model.train()
    torch.manual_seed(0)
    first = model(tokens)
    second = model(tokens)
    torch.manual_seed(0)
    assert torch.equal(model(tokens), first)
    assert not torch.equal(second, first)
    kept = []
    block = model.blocks["layer_0"]
    block.mlp_residual.register_forward_hook(lambda *call: torch.ones_like(call[-1]))
    block.attention_residual.register_forward_hook(lambda *call: torch.zeros_like(call[-1]))
    block.register_forward_hook(lambda _, given, out: kept.append((out - given[0]).detach()))
    for _ in range(20):
        model(tokens)
    added = torch.stack(kept).round()
    # what is kept is doubled; 15,360 coins, so that 0.5 is known to 0.004
    assert set(added.unique().tolist()) == {0.0, 2.0}
    assert abs(added.mean() / 2 - 0.5) < 0.02


def test_a_model_without_dropout_draws_nothing():
    model = _model().train()
    state = torch.get_rng_state()
    model(_tokens(12))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("preset", "millions"),
    [("demo", 1.0), ("llama_demo", 1.0), ("small", 10.8), ("medium", 33.5), ("gpt2_small", 124.4)],
)
def test_preset_has_the_promised_number_of_weights(preset, millions):
    text = (PRESETS / f"{preset}.yaml").read_text()
    config = from_dict(ModelConfig, yaml.safe_load(text), preset)
    with torch.device("meta"):
        model = build_decoder(config, [_sdpa] * config.depth)
    weights = sum(parameter.numel() for parameter in model.parameters())
    assert round(weights / 1e6, 1) == millions
    assert float(text.split("# Weights:")[1].split("M")[0]) == pytest.approx(millions, abs=0.05)
    assert weights == sum(value.numel() for value in model.state_dict().values()), "none twice"


def test_every_preset_is_counted_above():
    assert {path.stem for path in PRESETS.glob("*.yaml")} == {
        "demo",
        "llama_demo",
        "small",
        "medium",
        "gpt2_small",
    }


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_token_changes_no_earlier_logit(qk_norm):
    config = ModelConfig(depth=2, width=32, heads=2, context=12, vocab_size=17, qk_norm=qk_norm)
    model = _model(config).double()
    tokens = _tokens(12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


def test_each_layer_calls_its_own_attention_with_grouped_heads():
    seen = []

    def spy(name):
        def attend(q, k, v, *, causal, scale=None):
            seen.append((name, q.shape, k.shape, v.shape, causal))
            return _sdpa(q, k, v, causal=causal)

        return attend

    model = GPT(TINY, [spy("first"), spy("second")])
    assert model(_tokens(9)).shape == (2, 9, 17)
    shapes = ((2, 4, 9, 8), (2, 2, 9, 8), (2, 2, 9, 8))
    assert seen == [("first", *shapes, True), ("second", *shapes, True)]


def test_attention_modules_stay_out_of_the_state():
    class Heavy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, q, k, v, *, causal, scale=None):
            return _sdpa(q, k, v, causal=causal)

    plain, heavy = _model(), GPT(TINY, [Heavy(), Heavy()])
    assert list(plain.state_dict()) == list(heavy.state_dict())


def test_qk_norm_bounds_the_logits_that_attention_sees():
    scores = []

    def spy(q, k, v, *, causal, scale=None):
        k = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        scores.append((q @ k.transpose(-1, -2)).abs().max().item())
        return _sdpa(q, k, v.repeat_interleave(2, dim=1), causal=causal)

    for qk_norm in (False, True):
        config = ModelConfig(
            depth=1, width=32, heads=4, kv_heads=2, context=12, vocab_size=17, qk_norm=qk_norm
        )
        model = _model(config, spy)
        with torch.no_grad():
            for name in ("query", "key"):
                model.get_parameter(f"blocks.layer_0.{name}.weight").mul_(1e3)
        model(_tokens(12))
    assert scores[0] > 1e5
    assert scores[1] <= 8 * (1 + 1e-5), "head_dim, by Cauchy-Schwarz at unit scale"


@pytest.mark.parametrize("qk_norm", [False, True])
def test_every_weight_gets_a_gradient(qk_norm):
    config = ModelConfig(depth=2, width=32, heads=2, context=12, vocab_size=17, qk_norm=qk_norm)
    model = _model(config).double()
    model(_tokens(12)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        # a weight that softmax ignores would still get rounding noise, some 1e-16
        assert parameter.grad.abs().max() > 1e-9, name


def test_autocast_hands_bf16_to_attention_with_and_without_qk_norm():
    for qk_norm in (False, True):
        dtypes = []

        def spy(q, k, v, *, causal, scale=None, dtypes=dtypes):
            dtypes.extend([q.dtype, k.dtype, v.dtype])
            return _sdpa(q, k, v, causal=causal)

        config = ModelConfig(depth=1, width=32, heads=2, context=12, vocab_size=17, qk_norm=qk_norm)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            _model(config, spy)(_tokens(12))
        assert set(dtypes) == {torch.bfloat16}


def test_building_and_initialising_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    _model()
    assert torch.equal(torch.get_rng_state(), before)


def test_too_many_tokens_and_too_few_attentions_are_refused():
    with pytest.raises(ValueError, match=r"tokens must be at most 12 long, got \(2, 13\)"):
        _model()(_tokens(13))
    with pytest.raises(ValueError, match=r"one function a layer \(2\), got 1"):
        GPT(TINY, [_sdpa])
