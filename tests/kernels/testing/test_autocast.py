"""A check says what autocast changes in an attention, and nothing where it changes no bit."""

import pytest
import torch

from experiments.own_kernel import own_kernel
from tests.kernels.testing.checked import ONE, golden, plain, quick


def widening(q, k, v, *, causal, scale=None):
    """Attention in FP32, as the template's kernel, whose products autocast may round."""
    return own_kernel._attend(q, k, v, causal, scale, skips_tail_in=None)


def test_a_kernel_that_widens_gives_other_bits_under_autocast_and_is_told():
    report = quick(widening, cells=ONE)
    assert report.passed, "the answer stays"
    assert report.autocast.startswith(
        "Under autocast, as in a bf16-mixed study, it gives other bits (out, dq, dk, dv), as where "
    )
    assert "switch it off inside, with torch.autocast(q.device.type, ena" in report.autocast
    assert report.to_dict()["autocast"] == report.autocast
    assert torch.is_autocast_enabled("cpu") is False


@pytest.mark.parametrize("attention", [own_kernel.attend, plain, golden])
def test_of_a_kernel_that_keeps_autocast_out_nothing_is_said(attention):
    assert quick(attention, cells=ONE).autocast == ""


def _raising(error):
    def attention(q, k, v, *, causal, scale=None):
        if torch.is_autocast_enabled("cpu"):
            raise error
        return plain(q, k, v, causal=causal, scale=scale)

    return attention


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (RuntimeError("no FP32 here"), "it breaks its promises: raises RuntimeError: no FP32 here"),
        (NotImplementedError("no autocast"), "it refuses what it takes without: no autocast"),
    ],
)
def test_an_attention_that_raises_under_autocast_alone_is_told(error, said):
    report = quick(_raising(error), cells=ONE)
    assert report.passed
    assert said in report.autocast


def test_of_another_dtype_and_of_bits_that_do_not_repeat_nothing_is_said():
    def noisy(q, k, v, *, causal, scale=None):
        return plain(q, k, v, causal=causal, scale=scale) + torch.rand(()).to(q.dtype)

    assert quick(widening, "fp32", ONE).autocast == ""
    assert quick(noisy, cells=ONE).autocast == ""
