"""The baseline is eager attention with a rounding at each named point, in both directions."""

import pytest
import torch

from attention_kernels import (
    BASELINE_PROFILES,
    BaselineNumerics,
    baseline_attention,
    golden_attention,
)
from attention_kernels.testing import HARD_SHAPES, Shape, make_qkv, with_gradients

SHAPE = Shape(2, 4, 2, 65, 65, 40)


def draw(shape, dtype):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return q, k, v, torch.randn(q.shape, generator=generator).to(dtype)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("shape", HARD_SHAPES, ids=str)
def test_at_fp64_the_baseline_is_the_golden(shape, causal):
    inputs = draw(shape, torch.float64)
    numerics = BASELINE_PROFILES["golden"]
    base = with_gradients(baseline_attention, *inputs, causal=causal, numerics=numerics)
    gold = with_gradients(golden_attention, *inputs, causal=causal)
    for name in base:
        torch.testing.assert_close(base[name], gold[name], rtol=1e-13, atol=1e-13)


def test_forward_is_the_three_roundings_written_out():
    q, k, v, _ = draw(Shape(1, 2, 2, 33, 33, 64), torch.bfloat16)

    def bf16(x):
        return x.bfloat16().float()

    # head_dim 64: the scale 1/8 is a power of two, so it commutes with every rounding.
    weights = bf16(torch.softmax(bf16(q.float() @ k.float().mT / 8), dim=-1))
    assert torch.equal(baseline_attention(q, k, v), (weights @ v.float()).bfloat16())


def test_gradients_of_scores_and_softmax_are_rounded_too():
    q, k, v, dout = draw(Shape(1, 1, 1, 17, 17, 16), torch.bfloat16)

    def bf16(x):
        return x.bfloat16().float()

    got = with_gradients(baseline_attention, q, k, v, dout)
    exact = torch.softmax(bf16(q.float() @ k.float().mT / 4), dim=-1)
    dweights = bf16(dout.float() @ v.float().mT)
    dscores = bf16(exact * (dweights - (dweights * exact).sum(-1, keepdim=True)))
    near = {"rtol": 2**-8, "atol": 1e-6}  # one BF16 spacing: the sums above may round apart
    torch.testing.assert_close(got["dv"].float(), bf16(exact).mT @ dout.float(), **near)
    torch.testing.assert_close(got["dq"].float(), dscores / 4 @ k.float(), **near)
    torch.testing.assert_close(got["dk"].float(), dscores.mT / 4 @ q.float(), **near)


@pytest.mark.parametrize("point", BaselineNumerics().to_dict())
def test_each_rounding_point_is_live(point):
    inputs = draw(SHAPE, torch.float64)
    numerics = BASELINE_PROFILES["golden"]
    exact = with_gradients(baseline_attention, *inputs, numerics=numerics)
    lowered = numerics.with_(**{point: "bf16"})
    moved = with_gradients(baseline_attention, *inputs, numerics=lowered)
    for name, value in moved.items():
        # dv is dout times the weights: it never sees the rounding of out, nor dout of FP64.
        distance = (value - exact[name]).abs().max()
        assert distance > 1e-5, f"{name} is untouched by {point}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_results_have_the_dtype_and_shape_of_the_inputs(dtype):
    q, k, v, dout = draw(SHAPE, dtype)
    results = with_gradients(baseline_attention, q, k, v, dout)
    for name, like in zip(results, (q, q, k, v), strict=True):
        assert (results[name].dtype, results[name].shape) == (dtype, like.shape)


def test_rows_that_attend_nothing_give_zeros_and_zero_gradients():
    q, k, v, dout = draw(Shape(1, 2, 1, 70, 5, 16), torch.bfloat16)
    results = with_gradients(baseline_attention, q, k, v, dout, causal=True)
    assert not results["out"][:, :, :65].any()
    assert not results["dq"][:, :, :65].any()
    assert all(x.isfinite().all() for x in results.values())
