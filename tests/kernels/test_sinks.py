"""Attention sinks, as in GPT-OSS: a logit of each head that joins the denominator, without a value.

The definition is written anew here, with no line shared. The LSE includes the sink, as
FlashAttention's (`learnable_sink`) does, whose backward computes P from it.
"""

from typing import Any

import pytest
import torch

from attention_kernels import (
    baseline_attention,
    golden_attention,
)
from attention_kernels.numerics import EXPS
from attention_kernels.peers.registry import attention
from attention_kernels.testing import Shape, assert_within_budget, make_qkv
from tests.kernels.flash import SMALL, flash

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(100) * 2**-53 = 1e-15 each, with room."""

RESULTS = ("out", "lse", "dq", "dk", "dv", "dsinks")
SHAPE = Shape(2, 4, 2, 20, 17, 16, 24)
SINKS = torch.tensor([-2.0, 0.5, 3.0, 30.0], dtype=torch.float64)

EXACT = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    "twin": flash("twin", **SMALL),
    "twin, splits": flash("twin", splits=2, key_order="reversed", **SMALL),
    "twin, key blocks outside": flash("twin", loop_order="key_outer", **SMALL),
    "twin, old maxima kept": flash("twin", rescale_threshold=8.0, **SMALL),
    "triton": flash("triton", **SMALL),
    "triton, splits": flash("triton", splits=2, **SMALL),
}
BIAS = torch.linspace(-3, 3, 20 * 17, dtype=torch.float64).view(20, 17)
MASKS = {
    "full": {},
    "rows that attend nothing": {"causal": True},
    "window, softcap": {"window": (4, 2), "softcap": 2.0, "causal": True},
    "bias": {"attn_mask": BIAS, "scale": 0.6},
    "a batch that attends nothing": {"key_padding": torch.tensor([[True] * 17, [False] * 17])},
}


def draw(shape, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(dtype)


def definition(q, k, v, *, sinks, causal=False, softcap=0.0, window=(None, None), **others):
    """exp(scores) v over exp(sink) + the sum of exp(scores), with nothing subtracted."""
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (torch.stack([x] * group, dim=2).flatten(1, 2) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * others.get("scale", q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + others.get("attn_mask", 0.0)
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    left, right = (keys + queries if x is None else x for x in window)
    seen = (ahead >= -left) & (ahead <= (0 if causal else right))
    seen = seen & others.get("key_padding", torch.ones(len(q), keys) > 0)[:, None, None]
    powers = torch.exp(scores) * seen
    total = powers.sum(-1) + torch.exp(sinks)[:, None]
    return torch.einsum("bhqk,bhke->bhqe", powers, v) / total[..., None], total.log()


def with_gradients(attend: Any, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Return results and gradients by name; inputs are q, k, v, dout and the sinks."""
    q, k, v, dout, sinks = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v, sinks)]
    out, lse = attend(*leaves[:3], sinks=leaves[3], **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(RESULTS, (out.detach(), lse.detach(), *gradients), strict=True))


def run(name, *inputs, **options):
    attend = EXACT[name] if isinstance(name, str) else name
    return with_gradients(attend, *inputs, return_lse=True, **options)


def assert_close(ours, expected, rtol=FP64_RTOL):
    for result, right in expected.items():
        assert ours[result].shape == right.shape, result
        error = (ours[result] - right).abs().max().item()
        assert error <= rtol * right.abs().max().item(), result


# The interpreter is slow: two masks for it, one of which empties rows, and one for its splits.
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, mask) for name in EXACT for mask in MASKS if not name.startswith("triton")]
    + [("triton", "window, softcap")]
    + [
        pytest.param(name, "rows that attend nothing", marks=pytest.mark.slow)
        for name in ("triton", "triton, splits")
    ],
)
def test_each_is_the_definition_with_every_gradient(name, mask):
    inputs = draw(SHAPE)
    expected = with_gradients(definition, *inputs, SINKS, **MASKS[mask])
    assert expected["dsinks"].abs().min() > 0
    assert_close(run(name, *inputs, SINKS, **MASKS[mask]), expected)


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_row_that_attends_nothing_gives_0_and_the_sink_for_lse(name):
    results = run(name, *draw(SHAPE), SINKS, causal=True)  # three queries more than keys
    assert not results["out"][:, :, :3].any()
    assert not results["dq"][:, :, :3].any()
    assert torch.equal(results["lse"][:, :, :3], SINKS[:, None].expand(2, 4, 3))


@pytest.mark.parametrize("name", ["golden", "twin"])
def test_finite_differences_agree(name):
    q, k, v, _ = (x.requires_grad_() for x in draw(Shape(1, 2, 1, 3, 4, 16)))
    sinks = torch.tensor([0.3, 1.5], dtype=torch.float64, requires_grad=True)

    def attend(q, k, v, sinks):
        return EXACT[name](q, k, v, sinks=sinks, causal=True)

    assert torch.autograd.gradcheck(attend, (q, k, v, sinks))


def test_golden_in_chunks_has_the_gradient_of_the_sinks_where_no_other_is_wanted(monkeypatch):
    q, k, v, dout = draw(SHAPE)
    expected = with_gradients(definition, q, k, v, dout, SINKS)
    monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 8 * 17 * 5)
    sinks = SINKS.clone().requires_grad_()
    golden_attention(q, k, v, sinks=sinks).backward(dout)
    assert sinks.grad is not None
    assert_close({"dsinks": sinks.grad}, {"dsinks": expected["dsinks"]})


@pytest.mark.parametrize("name", ["golden", "baseline", "twin", "triton"])
def test_packed_sequences_are_attended_each_by_itself(name):
    queries, keys = [4, 3, 0, 14], [6, 0, 3, 17]
    q, k, v, dout = (x[0].transpose(0, 1) for x in draw(Shape(1, 4, 2, 21, 26, 16)))
    starts = [torch.tensor([0, *x]).cumsum(0).int() for x in (queries, keys)]
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1], "causal": True}
    ours = run(name, q, k, v, dout, SINKS, **packed)
    of_key = (k.split(keys), v.split(keys))
    parts = zip(q.split(queries), *of_key, dout.split(queries), strict=True)
    alone = [[x.transpose(0, 1).unsqueeze(0) for x in part] for part in parts]
    results = [with_gradients(definition, *x, SINKS, causal=True) for x in alone]
    assert_close({"dsinks": ours["dsinks"]}, {"dsinks": sum(x["dsinks"] for x in results)})
    assert_close({"lse": ours["lse"]}, {"lse": torch.cat([x["lse"][0] for x in results], dim=1)})
    for result in ("out", "dq", "dk", "dv"):
        whole = torch.cat([x[result][0].transpose(0, 1) for x in results])
        assert_close({result: ours[result]}, {result: whole})


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_packed_sequences_without_keys_give_the_sinks_zero_gradients(name):
    q, k, v, dout = (x[0].transpose(0, 1) for x in draw(Shape(1, 4, 2, 5, 3, 16)))
    starts = [torch.tensor(x, dtype=torch.int32) for x in ([0, 5, 5], [0, 0, 3])]
    packed = {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
    results = run(name, q, k, v, dout, SINKS, **packed)
    assert torch.equal(results.pop("lse"), SINKS[:, None].expand(4, 5))
    for result, x in results.items():
        assert not x.any(), result


@pytest.mark.parametrize("name", ["golden", "baseline", "twin", "triton"])
@pytest.mark.parametrize("sink", [-1e4, 1e4])
def test_a_sink_far_from_every_score_neither_overflows_nor_counts_twice(name, sink):
    attend = flash(name, "fa2", **SMALL) if name in ("twin", "triton") else EXACT[name]
    q, k, v, dout = draw(Shape(1, 2, 1, 5, 18, 16), torch.float32)
    results = run(attend, q, k, v, dout, torch.full((2,), sink))
    assert not results["dsinks"].any()
    if sink > 0:
        assert not any(results[result].any() for result in ("out", "dq", "dk", "dv"))
        assert (results["lse"] == sink).all()
        return
    without = attend(q, k, v, return_lse=True)
    torch.testing.assert_close(results["out"], without.out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results["lse"], without.lse, rtol=1e-6, atol=1e-6)


RULE = {
    "fa2": {},
    "fa1": {},
    "fa3": {"splits": 2},
    "fa4": {"key_order": "reversed"},
}


@pytest.mark.parametrize(
    ("engine", "profile"),
    [("twin", profile) for profile in RULE]
    + [pytest.param("triton", profile, marks=pytest.mark.slow) for profile in ("fa2", "fa3")],
)
def test_flash_attns_rule_holds_with_the_gradient_of_the_sinks(engine, profile):
    """max|flash - golden| <= 2 max|plain attention in BF16 - golden|, for out and gradients."""
    inputs = (*draw(Shape(1, 4, 2, 37, 49, 32), torch.bfloat16), SINKS.bfloat16())
    attend = flash(engine, profile, block_q=32, block_k=32, **RULE[profile])
    ours = run(attend, *inputs, causal=True)
    baseline = run("baseline", *inputs, causal=True)
    golden = run("golden", *(x.double() for x in inputs), causal=True)
    assert ours["dsinks"].dtype == torch.bfloat16
    for result in ("out", "dq", "dk", "dv", "dsinks"):
        assert_within_budget(ours[result], baseline[result], golden[result], what=result)
    torch.testing.assert_close(ours["lse"].double(), golden["lse"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("exp", EXPS)
def test_the_twins_gradient_of_the_sinks_is_the_kernels_with_each_exp(exp):
    inputs = (*draw(Shape(1, 4, 2, 9, 13, 16), torch.float32), SINKS)
    twin, kernel = (run(flash(name, "fa2", exp=exp), *inputs) for name in ("twin", "triton"))
    # a sum of terms of about 1 that cancel: how it is rounded depends on the CPU. At the maximum of
    # a row the folded exponent is 0 or a little less, by the CPU, where two pieces of the cubic
    # meet, each right to 8.8e-5: out differs by 4e-5 then, and both err by 1.7e-5 in dsinks
    atol = 3e-6 if exp == "exp2_polynomial_folded" else 5e-7
    torch.testing.assert_close(twin["dsinks"], kernel["dsinks"], rtol=2e-6, atol=atol)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_compiled_call_gives_the_bits_of_eager(name):
    torch.compiler.reset()
    inputs = (*draw(Shape(1, 4, 2, 9, 13, 16)), SINKS)

    def attend(q, k, v, sinks):
        return EXACT[name](q, k, v, sinks=sinks, causal=True)

    def gradients(attend):
        leaves = [x.detach().requires_grad_() for x in (*inputs[:3], SINKS)]
        out = attend(*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(gradients(compiled), gradients(attend), strict=True):
        assert torch.equal(ours, eager)


@pytest.mark.slow
def test_baseline_is_gpt_oss_own_attention():
    modeling = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    q, k, v, dout = draw(Shape(2, 4, 2, 18, 18, 16))
    hidden = torch.ones(18, 18, dtype=torch.bool).triu(1)
    added = torch.zeros(18, 18, dtype=torch.float64).masked_fill(hidden, -torch.inf)

    class Layer(torch.nn.Module):
        num_key_value_groups = 2

    def theirs(q, k, v, sinks):
        layer = Layer()
        layer.sinks = sinks
        out, _ = modeling.eager_attention_forward(layer, q, k, v, added.expand(2, 1, 18, 18), 0.25)
        return out.transpose(1, 2), None

    leaves = [x.detach().requires_grad_() for x in (q, k, v, SINKS)]
    out, _ = theirs(*leaves)
    gradients = torch.autograd.grad(out, leaves, dout)
    ours = run("baseline", q, k, v, dout, SINKS, causal=True)
    names = ("out", "dq", "dk", "dv", "dsinks")
    assert_close(ours, dict(zip(names, (out.detach(), *gradients), strict=True)))


@pytest.mark.parametrize(
    ("sinks", "message"),
    [
        (torch.zeros(2), r"sinks must be \(heads,\) = \(4,\), got \(2,\); give one logit"),
        (torch.zeros(1, 4), r"sinks must be \(heads,\) = \(4,\), got \(1, 4\)"),
        (torch.zeros(4, dtype=torch.int64), "sinks must be float64, float32, bfloat16 or float16"),
        (torch.zeros(4, device="meta"), "sinks must be on q's device cpu, got meta"),
        (torch.tensor([0, 1, torch.nan, 2]), "sinks must be finite, got"),
        (torch.tensor([0, 1, -torch.inf, 2]), "one finite logit for each head"),
        ([0.0] * 4, "sinks must be a tensor, got list"),
    ],
)
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_sinks_that_do_not_fit_are_refused(name, sinks, message):
    q, k, v, _ = draw(SHAPE)
    with pytest.raises(ValueError, match=message):
        EXACT[name](q, k, v, sinks=sinks)


@pytest.mark.parametrize("implementation", ["sdpa:math", "flex"])
def test_a_peer_without_sinks_refuses_them(implementation):
    q, k, v, _ = draw(Shape(1, 4, 2, 18, 18, 16))
    with pytest.raises(ValueError, match="attention: sinks must be left out with implementation"):
        attention(q, k, v, implementation=implementation, sinks=SINKS)
