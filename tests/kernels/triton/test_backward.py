"""The interpreted backward kernels: exact at FP64, the twin below, live at every point."""

import pytest
import torch

from attention_kernels import PROFILES
from attention_kernels.formats import FORMATS
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, make_qkv, nan_filled
from attention_kernels.triton import launch as triton_launch
from attention_kernels.twin import backward as twin_backward
from attention_kernels.twin import forward as twin_forward
from tests.sampling import one_in

GRADIENTS = ("dq", "dk", "dv")
SHAPES = [
    Shape(2, 2, 1, 1, 1, 16),
    Shape(1, 2, 2, 1, 65, 256),
    Shape(1, 4, 2, 63, 65, 40),
    Shape(1, 1, 1, 65, 63, 64),
    Shape(1, 3, 1, 113, 203, 96),
    Shape(1, 2, 1, 203, 113, 59),
]
CASES = [
    ("fa2", torch.bfloat16, 32),
    ("fa2", torch.float16, 64),
    ("all_bf16", torch.bfloat16, 64),
    ("all_bf16", torch.float64, 64),
]
RECURRING_POINTS = {
    "operands": GRADIENTS,
    "products": GRADIENTS,
    "scores": GRADIENTS,
    "statistics": GRADIENTS,
    "exponents": GRADIENTS,
    "probabilities": ("dv",),
}
BACKWARD_POINTS = {
    "delta_products": ("dq", "dk"),
    "delta": ("dq", "dk"),
    "dp": ("dq", "dk"),
    "ds_factors": ("dq", "dk"),
    "ds": ("dq", "dk"),
    "gradient_products": GRADIENTS,
    "dq_accumulator": ("dq",),
    "dkv_accumulator": ("dk", "dv"),
    "gradients": GRADIENTS,
}


def draw(shape, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, dtype, generator)
    return torch.randn(q.shape, generator=generator).to(dtype), q, k, v


def run(dout, q, k, v, profile="golden", causal=False, engine=triton_launch, **changes):
    """Gradients by name; out and lse are the twin's at the unchanged profile, in every call."""
    options = {"mask": Mask(causal=causal), "scale": q.shape[-1] ** -0.5}
    numerics = PROFILES[profile].resolve(q.dtype)
    out, lse = twin_forward.forward(q, k, v, **options, numerics=numerics)
    numerics = numerics.with_(**changes)
    *gradients, _, _ = engine.backward(dout, q, k, v, out, lse, **options, numerics=numerics)
    return dict(zip(GRADIENTS, gradients, strict=True))


def dense(dout, q, k, v, causal):
    """Gradients of softmax attention by autograd, in FP64."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, dim=1).mT * q.shape[-1] ** -0.5
    if causal:
        rows, keys = scores.shape[-2:]
        hidden = torch.ones(rows, keys, dtype=torch.bool).triu(1 + keys - rows)
        scores = scores.masked_fill(hidden, -1e300)
        dout = dout.clone()
        dout[:, :, : max(0, rows - keys)] = 0
    out = scores.softmax(-1) @ v.repeat_interleave(group, dim=1)
    return dict(zip(GRADIENTS, torch.autograd.grad(out, (q, k, v), dout.double()), strict=True))


def within_two_ulp(x, y, format):
    """Share of |x - y| within 2 spacings of `format` at y, or within FP32 noise of y's largest.

    The noise, head_dim * 2**-24, is all there is in a row that sees one key: dP - delta cancels.
    """
    x, y = x.double(), y.double()
    exponent = torch.frexp(y).exponent - 1
    spacing = torch.ldexp(torch.ones_like(y), exponent.clamp(min=format.min_exponent))
    noise = y.shape[-1] * 2.0**-24 * y.abs().max()
    allowed = (2 * spacing * 2.0**-format.mantissa_bits).clamp(min=noise)
    return ((x - y).abs() <= allowed).double().mean()


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", one_in(3, SHAPES), ids=str)
def test_with_every_point_at_fp64_the_gradients_are_those_of_dense_attention(shape, causal):
    tensors = draw(shape)
    expected = dense(*tensors, causal)
    for tiles in ({"block_q": 32, "block_k": 128}, {"block_q": 128, "block_k": 32}):
        with nan_filled():
            gradients = run(*tensors, causal=causal, **tiles)
        for name in GRADIENTS:
            # With one key dQ and dK vanish exactly, so the bound is relative to all three.
            bound = 1e-12 * max(expected[name].norm(), 0.1 * expected["dv"].norm())
            assert (gradients[name] - expected[name]).norm() <= bound, name


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("profile", "dtype", "block_k"), one_in(4, CASES), ids=str)
@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_the_kernels_are_the_twin_within_two_ulp(shape, profile, dtype, block_k, causal):
    tensors = draw(shape, dtype)
    with nan_filled():
        gradients = run(*tensors, profile, causal, block_k=block_k)
    twins = run(*tensors, profile, causal, twin_backward, block_k=block_k)
    format = FORMATS[PROFILES[profile].resolve(dtype).backward.gradients]
    for name in GRADIENTS:
        assert gradients[name].dtype == twins[name].dtype
        assert within_two_ulp(gradients[name], twins[name], format) >= 0.999, name


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_in_fp32_the_kernels_err_as_fp32_sums_may(shape):
    # The bound is derived in the forward's test of this name.
    tensors = draw(shape, torch.float32)
    gradients, expected = run(*tensors, "fa2"), dense(*tensors, False)
    bound = (shape.head_dim + shape.query_len + shape.key_len) * 2**-24
    for name in GRADIENTS:
        assert (gradients[name] - expected[name]).norm() <= bound * expected[name].norm(), name


@pytest.mark.parametrize("point", one_in(3, [*RECURRING_POINTS, *BACKWARD_POINTS]))
def test_each_point_moves_its_gradients_and_no_other(point):
    tensors = draw(Shape(1, 2, 1, 65, 130, 40))
    exact, lowered = run(*tensors), run(*tensors, **{point: "bf16"})
    twins = run(*tensors, engine=twin_backward, **{point: "bf16"})
    for name in GRADIENTS:
        moved = (RECURRING_POINTS | BACKWARD_POINTS)[point]
        # One BF16 rounding is 2**-9 of what it rounds, 1e-15 is FP64 noise.
        assert ((lowered[name] - exact[name]).abs().max() > 1e-6) == (name in moved), name
        assert (lowered[name] - twins[name]).norm() <= 1e-12 * twins[name].norm(), name


@pytest.mark.slow
def test_strides_do_not_change_a_bit():
    tensors = draw(Shape(2, 2, 2, 65, 70, 40), torch.bfloat16)
    expected = run(*tensors, "fa2", True)
    strided = run(*[x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors], "fa2", True)
    summed = tensors[0].new_ones(()).expand(tensors[0].shape)
    from_sum = run(summed, *tensors[1:], "fa2", True)
    from_ones = run(summed.contiguous(), *tensors[1:], "fa2", True)
    for name in GRADIENTS:
        assert torch.equal(strided[name], expected[name]), name
        assert torch.equal(from_sum[name], from_ones[name]), name


def test_rows_that_attend_nothing_get_and_give_no_gradient():
    tensors = draw(Shape(1, 1, 1, 100, 20, 16), torch.bfloat16)
    silenced = [x.clone() for x in tensors]
    silenced[0][:, :, :80] = 0
    gradients = run(*tensors, "fa2", True, block_q=16)
    expected = run(*silenced, "fa2", True, block_q=16)
    assert torch.equal(gradients["dq"][:, :, :80], torch.zeros(1, 1, 80, 16))
    for name in GRADIENTS:
        assert torch.equal(gradients[name], expected[name]), name


def test_heads_of_a_group_are_added_in_order():
    dout, q, k, v = draw(Shape(1, 3, 1, 65, 70, 16), torch.float32)
    grouped = run(dout, q, k, v, "fa2")
    apart = run(dout, q, k.expand(1, 3, 70, 16), v.expand(1, 3, 70, 16), "fa2")
    assert torch.equal(grouped["dq"], apart["dq"])
    first, second, third = apart["dv"].split(1, dim=1)
    assert torch.equal(grouped["dv"], first + second + third)
