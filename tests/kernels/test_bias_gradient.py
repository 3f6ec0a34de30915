"""A trained bias, as T5's position bias: what is added to the scores gets its gradient.

The definition is written anew (`definition`), with no line shared. The gradient is the sum of
dS = P (dP - delta) over the axes along which the bias is broadcast.
"""

import itertools
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from attention_kernels import baseline_attention, golden_attention
from attention_kernels.peers.registry import attention
from attention_kernels.testing import Shape, assert_within_budget, make_qkv
from attention_kernels.twin import backward as twin_backward
from tests.kernels.definition import definition
from tests.kernels.flash import SMALL, flash
from tests.sampling import one_in

FP64_RTOL = 1e-13
"""Two FP64 evaluations in other orders: about sqrt(100) * 2**-53 = 1e-15 each, with room."""

RESULTS = ("out", "dq", "dk", "dv", "dbias")
SHAPE = Shape(2, 4, 2, 20, 17, 16, 24)
SINKS = torch.tensor([-2.0, 0.5, 3.0, 30.0], dtype=torch.float64)
SHARED = list(itertools.product((1, 2), (1, 4), (1, 20), (1, 17)))
"""The shapes of a bias for `SHAPE`, with every set of axes that it may be broadcast along."""

EXACT = {
    "golden": golden_attention,
    "baseline": baseline_attention,
    "twin": flash("twin", **SMALL),
    "twin, splits": flash("twin", splits=2, key_order="reversed", **SMALL),
    "triton": flash("triton", **SMALL),
}
MASKS: dict[str, Any] = {
    "full": {},
    "rows that attend nothing": {"causal": True},
    "window, softcap": {"window": (4, 2), "softcap": 2.0, "causal": True},
    "sinks, scale": {"sinks": SINKS, "scale": 0.6},
    "a batch that attends nothing": {"key_padding": torch.tensor([[True] * 17, [False] * 17])},
    "alibi": {"alibi_slopes": torch.tensor([0.1, 0.2, 0.4, 0.8], dtype=torch.float64)},
}


def draw(shape, bias_shape, dtype=torch.float64, seed=0):
    """q, k, v, dout and a bias."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    dout = torch.randn((*q.shape[:3], v.shape[3]), generator=generator).to(dtype)
    return q, k, v, dout, torch.randn(bias_shape, generator=generator).to(dtype)


def run(name, *inputs: Any, **options: Any) -> dict[str, Any]:
    """Return out and gradients by name; inputs are q, k, v, dout and the bias."""
    attend = EXACT[name] if isinstance(name, str) else name
    q, k, v, dout, bias = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v, bias)]
    out = attend(*leaves[:3], attn_mask=leaves[3], **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(RESULTS, (out.detach(), *gradients), strict=True))


def assert_close(ours, expected, rtol=FP64_RTOL):
    """Within `rtol` of the largest value, and of 1: shared keys make every dbias a sum of 0."""
    for result, right in expected.items():
        assert ours[result].shape == right.shape, result
        error = (ours[result] - right).abs().max().item()
        assert error <= rtol * max(1.0, right.abs().max().item()), result


# The interpreter is slow: two masks for it.
@pytest.mark.parametrize(
    ("name", "mask"),
    [(name, mask) for name in EXACT for mask in MASKS if name != "triton"]
    + [("triton", "window, softcap")]
    + [
        pytest.param("triton", mask, marks=pytest.mark.slow)
        for mask in MASKS
        if mask != "window, softcap"
    ],
)
def test_each_is_the_definition_with_every_gradient(name, mask):
    inputs = draw(SHAPE, (1, 4, 20, 17))
    expected = run(definition, *inputs, **MASKS[mask])
    assert expected["dbias"].abs().max() > 0.1
    assert_close(run(name, *inputs, **MASKS[mask]), expected)


@pytest.mark.parametrize(
    ("name", "shape"),
    [(name, shape) for name in ("golden", "baseline", "twin") for shape in SHARED]
    + one_in(16, [("triton", shape) for shape in SHARED], slow=4),
    ids=str,
)
def test_the_gradient_is_summed_over_every_axis_that_is_shared(name, shape):
    inputs = draw(SHAPE, shape)
    assert_close(run(name, *inputs, softcap=2.0), run(definition, *inputs, softcap=2.0))


@pytest.mark.parametrize("shape", [(17,), (20, 17), (4, 1, 17)], ids=str)
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_axes_that_are_left_out_are_shared(name, shape):
    inputs = draw(SHAPE, shape)
    assert_close(run(name, *inputs), run(definition, *inputs))


LENGTHS = [(1, 1), (1, 65), (63, 64), (64, 63), (65, 65)]
"""Around a block of 64."""


@pytest.mark.parametrize(
    ("lengths", "axes"),
    one_in(5, itertools.product(LENGTHS, itertools.product((0, 1), (0, 1), (0, 1)))),
    ids=str,
)
def test_the_kernel_adds_what_the_twin_adds(lengths, axes):
    queries, keys = lengths
    full = (2, 2, queries)
    bias_shape = (*(n if own else 1 for n, own in zip(full, axes, strict=True)), keys)
    inputs = draw(Shape(2, 2, 1, queries, keys, 16), bias_shape)
    results = {e: run(flash(e), *inputs, causal=True) for e in ("twin", "triton")}
    right = results["twin"]["dbias"]
    error = (results["triton"]["dbias"] - right).norm()
    # one key alone has a gradient of 0, in which dP - delta cancels
    assert error <= 1e-14 * max(1.0, right.norm())


@pytest.mark.parametrize(
    "shape", [(1, 2, 1, 4), pytest.param((2, 1, 3, 4), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_finite_differences_agree(name, shape):
    q, k, v, _, bias = draw(Shape(2, 2, 1, 3, 4, 16), shape)

    def attend(bias):
        return EXACT[name](q, k, v, attn_mask=bias, softcap=3.0, window=(2, 1))

    assert torch.autograd.gradcheck(attend, bias.requires_grad_())


@pytest.mark.parametrize("name", [*EXACT])
def test_hidden_entries_get_zero_and_no_gradient_is_nan(name):
    """-inf in the bias hides a key; one row of a batch of two is hidden whole."""
    *inputs, bias = draw(SHAPE, (2, 1, 20, 17))
    bias[:, :, 3, 5:9] = -torch.inf
    bias[1, :, 7] = -torch.inf
    results = run(name, *inputs, bias)
    assert not any(x.isnan().any() for x in results.values())
    assert not results["dbias"][bias == -torch.inf].any()
    assert results["dbias"][bias > -torch.inf].abs().min() > 0
    assert not results["out"][1, :, 7].any()
    assert_close(results, run(definition, *inputs, bias))


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_a_gradient_is_given_where_no_other_is_wanted(name):
    q, k, v, dout, bias = draw(SHAPE, (1, 4, 1, 17))
    expected = run(definition, q, k, v, dout, bias)["dbias"]
    leaf = bias.requires_grad_()
    EXACT[name](q, k, v, attn_mask=leaf).backward(dout)
    assert leaf.grad is not None
    assert_close({"dbias": leaf.grad}, {"dbias": expected})


def test_no_gradient_of_a_constant_bias_is_computed(monkeypatch):
    monkeypatch.setattr(twin_backward, "_add_to_bias", lambda *_: pytest.fail("it was"))
    q, k, v, dout, bias = draw(SHAPE, (1, 4, 20, 17))
    q.requires_grad_()
    flash("twin")(q, k, v, attn_mask=bias).backward(dout)
    assert q.grad is not None


@pytest.mark.parametrize("shape", SHARED, ids=str)
def test_golden_in_chunks_adds_what_its_chunks_share(shape, monkeypatch):
    inputs = draw(SHAPE, shape)
    expected = run(definition, *inputs, window=(3, 3))
    for scores in (5 * 17, 3 * 20 * 17):  # of a chunk: a few rows of a head, or some heads
        monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * scores)
        assert_close(run("golden", *inputs, window=(3, 3)), expected)


def test_golden_saves_no_scores_for_the_gradient_of_a_bias(monkeypatch):
    monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 64 * 8)
    q, k, v, _, bias = draw(Shape(1, 2, 1, 64, 64, 16), (64,))
    sizes = []

    def packed(x):
        sizes.append(x.numel())
        return x

    with saved_tensors_hooks(packed, lambda x: x):
        golden_attention(q, k, v, attn_mask=bias.requires_grad_()).sum()
    assert 0 < max(sizes) <= 2 * 64 * 16


@pytest.mark.parametrize(
    "name",
    ["golden", "golden, chunks", "twin", pytest.param("triton", marks=pytest.mark.slow)],
)
def test_the_gradient_is_rounded_once_to_the_dtype_of_the_bias(name, monkeypatch):
    """A bias in BF16 beside q in FP32 has the gradient that one in FP32 has, rounded."""
    if name == "golden, chunks":
        monkeypatch.setattr("attention_kernels.golden.CHUNK_BYTES", 8 * 5 * 17)
    attend = golden_attention if "golden" in name else flash(name, "fa2", **SMALL)
    *inputs, bias = draw(SHAPE, (1, 1, 1, 17), torch.float32)
    bias = bias.bfloat16()
    wide = torch.float64 if "golden" in name else torch.float32
    whole = run(attend, *inputs, bias.to(wide))["dbias"]
    ours = run(attend, *inputs, bias)["dbias"]
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, whole.bfloat16())


REACHED = ("operands", "scores", "statistics", "probabilities", "output", "lse", "delta", "dp")
NOT_REACHED = ("ds", "dq_accumulator", "dkv_accumulator", "gradients")


@pytest.mark.parametrize("engine", ["twin", pytest.param("triton", marks=pytest.mark.slow)])
def test_the_gradient_is_that_before_ds_is_rounded(engine):
    inputs = draw(Shape(1, 2, 1, 33, 40, 16), (1, 2, 33, 40))
    exact = run(flash(engine, **SMALL), *inputs)["dbias"]
    for point in REACHED + NOT_REACHED:
        moved = run(flash(engine, **{point: "bf16"}, **SMALL), *inputs)["dbias"]
        assert torch.equal(moved, exact) == (point in NOT_REACHED), point


RULE = {"fa2": {}, "fa1": {}, "fa3": {"splits": 2}, "fa4": {"key_order": "reversed"}}


@pytest.mark.parametrize(
    ("shape", "dtype"),
    list(
        itertools.product(
            [(1, 4, 37, 49), (2, 4, 37, 49), (2, 1, 1, 49)], [torch.bfloat16, torch.float16]
        )
    ),
    ids=str,
)
@pytest.mark.parametrize(
    ("engine", "profile"),
    one_in(3, [("twin", profile) for profile in RULE])
    + [pytest.param("triton", profile, marks=pytest.mark.long) for profile in ("fa2", "fa3")],
)
def test_flash_attns_rule_holds_with_the_gradient_of_the_bias(engine, profile, shape, dtype):
    """max|flash - golden| <= 2 max|plain attention - golden|, for out and gradients."""
    inputs = draw(Shape(2, 4, 2, 37, 49, 32), shape, dtype)
    attend = flash(engine, profile, block_q=32, block_k=32, **RULE[profile])
    ours = run(attend, *inputs, causal=True)
    baseline = run("baseline", *inputs, causal=True)
    golden = run("golden", *(x.double() for x in inputs), causal=True)
    assert ours["dbias"].dtype == dtype
    for result in RESULTS:
        assert_within_budget(ours[result], baseline[result], golden[result], what=result)


@pytest.mark.parametrize("shape", [(1, 4, 20, 17), (1, 1, 1, 17)], ids=str)
@pytest.mark.parametrize(
    "name", ["golden", "baseline", "twin", pytest.param("triton", marks=pytest.mark.slow)]
)
def test_twice_gives_the_same_bits(name, shape):
    attend = flash(name, "fa2", **SMALL) if name in ("twin", "triton") else EXACT[name]
    inputs = draw(SHAPE, shape, torch.bfloat16)
    first, second = run(attend, *inputs), run(attend, *inputs)
    for result in RESULTS:
        assert torch.equal(first[result], second[result]), result


@pytest.mark.parametrize("profile", one_in(3, ["fa3_fp8", "all_bf16", "fa4"]))
def test_the_kernel_is_the_twin_in_every_kind_of_numerics(profile):
    """Rounded at the same points; within BF16's noise, as each may round another neighbour."""
    inputs = draw(Shape(1, 2, 1, 33, 40, 16), (1, 2, 1, 40), torch.bfloat16)
    twin, triton = (
        run(flash(engine, profile, block_q=32, block_k=32), *inputs)
        for engine in ("twin", "triton")
    )
    error = (triton["dbias"].double() - twin["dbias"].double()).norm()
    assert error <= 2**-7 * twin["dbias"].double().norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
@pytest.mark.parametrize("trained", [True, False])
def test_a_compiled_call_gives_the_bits_of_eager(name, trained):
    torch.compiler.reset()
    q, k, v, dout, bias = draw(Shape(1, 4, 2, 9, 13, 16), (1, 4, 9, 13))

    def attend(q, k, v, sinks, bias):
        return EXACT[name](q, k, v, sinks=sinks, attn_mask=bias, causal=True)

    def gradients(attend):
        leaves = [x.detach().requires_grad_() for x in (q, k, v, SINKS)]
        leaves += [bias.detach().requires_grad_()] if trained else []
        out = attend(*leaves, *([] if trained else [bias]))
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for ours, eager in zip(gradients(compiled), gradients(attend), strict=True):
        assert torch.equal(ours, eager)


def test_vmap_over_the_bias_is_each_call_alone():
    q, k, v, dout, _ = draw(SHAPE, (1,))
    biases = torch.randn(3, 1, 4, 20, 17, generator=torch.Generator().manual_seed(1)).double()

    def grads(attend):
        leaf = biases.clone().requires_grad_()
        return torch.autograd.grad((attend(leaf) * dout).sum(), leaf)[0]

    ours = grads(torch.vmap(lambda bias: flash("twin")(q, k, v, attn_mask=bias)))
    alone = grads(lambda leaf: torch.stack([flash("twin")(q, k, v, attn_mask=b) for b in leaf]))
    assert torch.equal(ours, alone)


@pytest.mark.parametrize("name", ["golden", "baseline", "twin"])
def test_slopes_of_alibi_are_trained_through_the_bias_that_they_make(name):
    q, k, v, dout, _ = draw(SHAPE, (1,))
    slopes = MASKS["alibi"]["alibi_slopes"]
    ahead = torch.arange(17) - torch.arange(20)[:, None] + 3
    leaf = slopes.clone().requires_grad_()
    out = EXACT[name](q, k, v, attn_mask=-leaf[:, None, None] * ahead.abs())
    torch.testing.assert_close(out, EXACT[name](q, k, v, alibi_slopes=slopes))
    (ours,) = torch.autograd.grad(out, leaf, dout)
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    leaf = slopes.clone().requires_grad_()
    expected = definition(q, k, v, attn_mask=zero, alibi_slopes=leaf)
    torch.testing.assert_close(ours, torch.autograd.grad(expected, leaf, dout)[0])
    with pytest.raises(ValueError, match="alibi_slopes must be without gradient, got requires_gr"):
        EXACT[name](q, k, v, alibi_slopes=leaf)


def test_the_peer_that_gives_the_gradient_is_the_definition():
    inputs = draw(Shape(2, 4, 4, 20, 17, 16), (2, 1, 20, 17))

    def sdpa(q, k, v, **options):
        return attention(q, k, v, implementation="sdpa:math", **options)

    assert_close(run(sdpa, *inputs, causal=True), run(definition, *inputs, causal=True))


@pytest.mark.parametrize("implementation", ["sdpa:flash", "sdpa:efficient", "flex"])
def test_a_peer_that_gives_no_gradient_refuses_a_trained_bias(implementation):
    q, k, v, _, bias = draw(Shape(1, 4, 4, 18, 18, 16), (18, 18))
    message = "attn_mask must be without gradient with implementation '.*', got requires_grad=True"
    with pytest.raises(ValueError, match=message):
        attention(q, k, v, implementation=implementation, attn_mask=bias.requires_grad_())
