"""`shadow` on torch models: catches every call, changes nothing, finds what was planted."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.module import _global_forward_hooks

from attention_kernels import flash_attention, golden_attention
from experiments.kit.cost import peak_allocation
from stability import shadow
from stability.config.schema import AttentionConfig
from stability.records.metric_names import deviation_name
from tests.sampling import one_in
from tests.stability.intercept.torch_models import (
    Decoder,
    drops_a_key,
    tokens,
    train_step,
    unseen,
)

EVERYTHING = {"heads": True, "positions": 2, "inside": True, "inherited": True}


def _train(model, steps=3, precision=torch.float32, micro_batches=1, probe=None):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(5)
    for step in range(steps):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            train_step(model, 10 * step + micro_batch, precision)
        optimizer.step()
        if probe is not None:
            probe.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16-mixed"])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_training_ends_in_the_same_bits_with_everything_on(precision, micro_batches):
    """Weights, BatchNorm's buffers and the random stream of dropout are all part of it."""
    torch.manual_seed(0)
    model = Decoder(dropout=0.1)
    twin = copy.deepcopy(model)
    plain = _train(model, precision=precision, micro_batches=micro_batches)
    random_state = torch.get_rng_state()
    with shadow(twin, ["flash:fa2", "baseline:fp16_softmax"], **EVERYTHING) as probe:
        watched = _train(twin, precision=precision, micro_batches=micro_batches, probe=probe)
    assert probe.layers == ("layers.0", "layers.1", "layers.2")
    assert len(probe.metrics) > 1000
    assert not probe.findings
    assert torch.equal(torch.get_rng_state(), random_state)
    for name, value in plain.items():
        assert torch.equal(value, watched[name]), name


def test_no_candidate_is_refused_before_it_trains():
    with pytest.raises(ValueError, match=r"candidate must name at least one, got \[\]"):
        shadow(Decoder(), []).__enter__()


def test_figures_are_of_the_steps_asked_for_and_the_model_is_left_as_it_was():
    model = Decoder()
    seen = []
    with shadow(model, every=3, sinks=[lambda step, r: seen.append(step)]) as probe:
        for step in range(5):
            assert bool(_global_forward_hooks) == (step in (0, 3))
            train_step(model, step)
            probe.step()
    assert seen == [0, 3]
    assert not _global_forward_hooks
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_a_planted_error_is_at_exactly_its_layer_and_head():
    calls = [0]
    model = Decoder(depth=4)
    with shadow(model, drops_a_key(calls, layer=2, head=1), heads=True, backward=False) as probe:
        model(tokens(0))
        probe.step()
    figures = {
        (layer, head): probe.metrics[
            deviation_name(f"layers.{layer}", "out", "error_ratio", part=f"head_{head}")
        ]
        for layer in range(4)
        for head in range(4)
    }
    worst = max(figures, key=figures.__getitem__)
    assert worst == (2, 1)
    assert figures[worst] > 1e3 * sorted(figures.values())[-2]


def test_inherited_error_is_told_from_error_made_here():
    """Only layer 0 of the candidate is wrong: later layers carry what it made."""

    def wrong(q, k, v, *, causal, scale=None):
        out = golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)
        at_first[0] += 1
        return out * 1.01 if q.data_ptr() and is_first(q) else out

    at_first = [0]
    model = Decoder(depth=3).double()
    embedded = []
    model.layers[0].register_forward_pre_hook(lambda m, args: embedded.append(args[0].detach()))

    def is_first(q):
        own = model.layers[0].qkv(embedded[0]).chunk(3, -1)[0].unflatten(-1, (4, -1))
        return torch.equal(own.transpose(1, 2), q)

    with shadow(model, wrong, inherited=True) as probe:
        train_step(model, 0)
        probe.step()
    figures = {
        (layer, what): probe.metrics[f"deviation/layers.{layer}/{what}/rel_fro"]
        for layer in range(3)
        for what in ("out", "carried", "total")
    }
    assert figures[0, "out"] == pytest.approx(0.01, rel=1e-6)
    assert figures[0, "total"] == pytest.approx(0.01, rel=1e-6)
    assert figures[0, "carried"] == 0
    for layer in (1, 2):
        assert figures[layer, "out"] < 1e-12
        assert figures[layer, "carried"] > 1e-5
        assert figures[layer, "total"] == pytest.approx(figures[layer, "carried"], rel=1e-6)


def _raises(q, k, v, *, causal, scale=None):
    raise RuntimeError("no kernel for\nthis")


def _wrong_shape(q, k, v, *, causal, scale=None):
    return flash_attention(q, k, v, causal=causal)[..., :-1]


def _wrong_dtype(q, k, v, *, causal, scale=None):
    return flash_attention(q, k, v, causal=causal).double()


def _no_gradient(q, k, v, *, causal, scale=None):
    return flash_attention(q, k, v, causal=causal).detach()


def _not_a_number(q, k, v, *, causal, scale=None):
    out = flash_attention(q, k, v, causal=causal)
    bad = torch.zeros_like(out)
    bad[0, 0, 0, :3] = torch.nan
    return out + bad


@pytest.mark.parametrize(
    ("candidate", "text"),
    [
        (_raises, "_raises: RuntimeError: no kernel for"),
        (_wrong_shape, "_wrong_shape: BadResultError: returned (2, 4, 24, 15) torch.float32, exp"),
        (_wrong_dtype, "_wrong_dtype: BadResultError: returned (2, 4, 24, 16) torch.float64, exp"),
        (_no_gradient, "_no_gradient: BadResultError: out carries no gradient"),
        (_not_a_number, "3 values of out not finite"),
    ],
)
def test_a_bad_candidate_is_a_finding_with_layer_and_step_and_the_run_goes_on(candidate, text):
    torch.manual_seed(0)
    model = Decoder()
    twin = copy.deepcopy(model)
    plain = _train(model)
    with shadow(twin, candidate, every=2) as probe:
        watched = _train(twin, probe=probe)
    assert {(step, layer) for step, layer, _ in probe.findings[:3]} == {
        (0, f"layers.{i}") for i in range(3)
    }
    assert all(found.startswith(text) for _, _, found in probe.findings[:3]), probe.findings
    assert all(torch.equal(value, watched[name]) for name, value in plain.items())


def test_a_candidate_that_writes_into_its_inputs_does_not_reach_the_run():
    def writes(q, k, v, *, causal, scale=None):
        with torch.no_grad():
            q.mul_(2)
            v.zero_()
        return flash_attention(q, k, v, causal=causal)

    torch.manual_seed(0)
    model = Decoder()
    twin = copy.deepcopy(model)
    with shadow(twin, writes) as probe:
        watched = _train(twin, probe=probe)
    assert all(torch.equal(value, watched[name]) for name, value in _train(model).items())


@unseen
def test_attention_dropout_is_refused_at_set_up_and_seen_in_a_call():
    layer = nn.TransformerEncoderLayer(32, 2, dropout=0.1)
    with pytest.raises(ValueError, match=r"attention dropout must be 0, got 0.1 in self_attn"):
        shadow(layer).__enter__()

    class Drops(nn.Module):
        def forward(self, q):
            return F.scaled_dot_product_attention(q, q, q, dropout_p=0.2)

    with shadow(Drops(), evaluation=True) as probe, torch.no_grad():
        probe._model(torch.randn(1, 2, 8, 16))
        probe.step()
    assert "not looked at: dropout_p 0.2" in probe.findings[0][2]


def test_torchs_own_attention_modules_are_caught_with_their_masks():
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    padding = torch.zeros(3, 9, dtype=torch.bool)
    padding[1, 5:] = True
    x = torch.randn(3, 9, 32)
    plain = layer(x, src_key_padding_mask=padding)
    with shadow(layer, "flash:fa2", golden=True) as probe:
        watched = layer(x, src_key_padding_mask=padding)
        watched.sum().backward()
        probe.step()
    assert torch.equal(plain, watched)
    assert probe.layers == ("self_attn",)
    assert probe.metrics["deviation/self_attn/out/rel_fro"] < 1e-5
    # rows of padding are left out: 5 of the 9 rows of one of three sequences
    compared = sum(probe.counts["deviation/self_attn/out/ulp_histogram"])
    assert compared == (3 * 9 - 4) * 2 * 16


class _Pools(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return self.linear(x)


class _OwnAttention(_Pools):
    pass


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (_Pools(), (torch.randn(2, 8),), "_Pools has no attention that .* seen: _Pools, Linear"),
        (
            _OwnAttention(),
            (torch.randn(2, 8),),
            r"model: not seen: _OwnAttention ran, .*stability.attention_call\(attend\)",
        ),
        (
            nn.MultiheadAttention(32, 2),
            (torch.randn(5, 32),) * 3,
            "call it with need_weights=False",
        ),
    ],
    ids=["none", "own", "weights"],
)
def test_a_model_with_nothing_to_catch_is_told_what_was_seen(model, inputs, message):
    with shadow(model) as probe:
        model(*inputs)
        with pytest.raises(ValueError, match=message):
            probe.step()


def test_a_compiled_model_is_refused_where_its_attention_is_to_be_another():
    model = Decoder()
    text = "must run eagerly where replace, .* is given, got OptimizedModule at its root"
    with pytest.raises(ValueError, match=text):
        shadow(torch.compile(model, backend="eager"), replace=["*"]).__enter__()
    model.layers[1].compile(backend="eager")
    with pytest.raises(ValueError, match=r"got Attention.compile\(\) at layers.1"):
        shadow(model, inherited=True).__enter__()
    model = Decoder()
    model.forward = torch.compile(model.forward, backend="eager")
    with pytest.raises(ValueError, match=r"got Decoder with a compiled forward at its root"):
        shadow(model, gradient_every=2, loss=lambda: model(tokens(0)).sum()).__enter__()
    with pytest.raises(ValueError, match=r"model must be a torch.nn.Module, got function"):
        shadow(lambda x: x).__enter__()
    with pytest.raises(ValueError, match=r"got 'fa9'; nearest: fa"):
        shadow(Decoder(), "flash:fa9").__enter__()


def test_an_attention_that_rounds_stochastically_is_refused_where_it_is_to_train():
    draws = AttentionConfig(implementation="flash", numerics={"rounding": "stochastic"})
    with pytest.raises(ValueError, match=r"got flash:fa2: a loop of your own tells no \(step, lay"):
        shadow(Decoder(), draws, replace=["*"]).__enter__()
    with shadow(Decoder(), draws):  # beside the model's own: one draw of its rounding
        pass


@pytest.mark.parametrize("at", [0, 2])
def test_a_part_that_is_compiled_meanwhile_is_refused_by_name(at):
    model = Decoder()
    with shadow(model, every=2, replace=["layers.*"]) as probe:
        for step in range(at):
            train_step(model, step)
            probe.step()
        model.layers[1].compile(backend="eager")
        with pytest.raises(ValueError, match=r"got Attention.compile\(\) at layers.1"):
            train_step(model, 0)
    assert not _global_forward_hooks
    assert torch._C._len_torch_function_stack() == 0


def test_a_module_called_twice_has_a_figure_for_each_call():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = Decoder(depth=1).layers[0]

        def forward(self, x):
            return self.inner(self.inner(x))

    model = Twice()
    with shadow(model) as probe:
        model(torch.randn(2, 8, 64)).sum().backward()
        probe.step()
    assert probe.layers == ("inner", "inner#1")
    assert probe.metrics["deviation/inner#1/dq/rel_fro"] > 0


def test_lengths_that_differ_are_causal_from_the_top_left():
    class Cross(nn.Module):
        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, is_causal=True)

    model = Cross()
    with shadow(model, "flash:fa2") as probe:
        model(torch.randn(1, 2, 5, 16), torch.randn(1, 2, 9, 16))
        probe.step()
    assert probe.metrics["deviation/model/out/rel_fro"] < 1e-5
    assert probe.metrics["deviation/model/out/golden_baseline_rel_fro"] < 1e-5


MODULES = {"layers.*.out": "emulated:bf16"}


@pytest.mark.parametrize(
    "options", one_in(3, [{}, {"backward": False}, {"modules": MODULES}]), ids=str
)
def test_memory_of_a_due_step_does_not_grow_with_depth(options):
    """One layer's results live at a time; of a module its out is kept, which its repeat is to be.

    What grows beside are the numbers that go to the host.
    """
    extra = {}
    for depth in (2, 12):
        model = Decoder(depth=depth)

        def look(model=model):
            with shadow(model, **{"candidate": "flash:fa2", **options}) as probe:
                train_step(model, 0)
                probe.step()

        look()
        plain = peak_allocation(partial(train_step, model, 0), "cpu")
        extra[depth] = peak_allocation(look, "cpu") - plain
    one_tensor = 2 * 24 * 64 * 4
    kept = one_tensor if "modules" in options else 0
    assert extra[2] > 10 * one_tensor
    assert extra[12] - extra[2] <= 10 * (kept + 512)
