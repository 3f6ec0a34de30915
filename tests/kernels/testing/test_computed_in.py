"""An attention that computes in a shorter format than its inputs' is told so, and no other is."""

import pytest
import torch

from attention_kernels import golden_attention
from attention_kernels.testing import check_attention, plant
from tests.kernels.testing.checked import FEW, golden, plain, quick

ERRS_AS_BF16 = "it errs as BF16 would: the kernel seems to compute in it"


def _cast(dtype, attention, gain=1.0):
    """The attention of q, k and v cast to `dtype`, in the dtype that they came in."""

    def casting(q, k, v, *, causal, scale=None):
        scale = gain * (q.shape[-1] ** -0.5 if scale is None else scale)
        short = (x.to(dtype) for x in (q, k, v))
        return attention(*short, causal=causal, scale=scale).to(q.dtype)

    return casting


def _widened(q, k, v, *, causal, scale=None):
    """Attention in FP64 of inputs that may have been rounded before: no rounding of its own."""
    return golden_attention(q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("attention", [plain, golden, _widened])
def test_one_that_computes_in_bf16_is_told_so_with_what_to_do(attention, dtype):
    casting = _cast(torch.bfloat16, attention)
    assert quick(casting, "bf16", FEW).passed
    said = quick(casting, dtype, FEW).sentence
    assert ERRS_AS_BF16 in said
    assert "check it with `--dtype bf16`, or raise NotImplementedError for a dtype that" in said
    assert said.endswith("(seen in out, dq, dk, dv)")


def test_it_is_told_of_two_dtypes_at_once():
    report = check_attention(_cast(torch.bfloat16, plain), dtypes=["fp16", "fp32"], cells=FEW)
    assert f"FAILS at fp16, fp32: {ERRS_AS_BF16}" in report.sentence


def test_one_that_computes_in_fp16_is_not_taken_for_bf16():
    said = quick(_cast(torch.float16, plain), "fp32", FEW).sentence
    assert "it errs as FP16, or TF32 that rounds to nearest, would" in said
    assert "check it with `--dtype fp16`, or switch TF32 off" in said


def test_what_is_wrong_beside_the_format_is_told():
    for gain in (1.003, 0.98):
        said = quick(_cast(torch.bfloat16, plain, gain), "fp32", FEW).sentence
        assert ERRS_AS_BF16 not in said
    said = quick(_cast(torch.bfloat16, plain, 1.003), "fp32", FEW).sentence
    assert "q, k and v are rounded to BF16 and more is wrong than that: check it with" in said


def test_errors_as_large_that_are_not_of_rounded_inputs_are_not_called_bf16():
    def coarse_weights(q, k, v, *, causal, scale=None):
        """A right attention in BF16 by size: out is rounded to it, and q, k and v are not."""
        out = plain(q, k, v, causal=causal, scale=scale)
        return out + (out.detach().bfloat16().to(out.dtype) - out.detach())

    for wrong in (coarse_weights, *(plant(plain, x) for x in ("scale_gain", "causal_leak"))):
        report = quick(wrong, "fp32", FEW)
        assert not report.passed
        assert "BF16" not in report.sentence


def test_a_backward_alone_in_bf16_is_told_of_the_gradients_alone():
    in_bf16 = _cast(torch.bfloat16, plain)

    def attention(q, k, v, *, causal, scale=None):
        short = in_bf16(q, k, v, causal=causal, scale=scale)
        with torch.no_grad():
            exact = plain(q, k, v, causal=causal, scale=scale)
        return short + (exact - short.detach())

    said = quick(attention, "fp32", FEW).sentence
    assert ERRS_AS_BF16 in said
    assert said.endswith("(seen in dq, dk, dv)")
