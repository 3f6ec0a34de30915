"""Weights P that alone are rounded to a shorter format are told by the error of out."""

import pytest
import torch

from tests.kernels.testing.checked import FEW, quick


def attending(rounded, *, of_qk=None, noise=0.0):
    """Return attention that rounds P in this way, and q and k to a format, and is noisy."""

    def attention(q, k, v, *, causal, scale=None):
        group = q.shape[1] // k.shape[1]
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        if of_qk is not None:
            q, k = q.to(of_qk).to(v.dtype), k.to(of_qk).to(v.dtype)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        if causal:
            visible = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
            scores = scores.masked_fill(~visible, -torch.inf)
        drawn = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0))
        return rounded(scores + noise * drawn, v).to(q.dtype)

    return attention


def of_p(format):
    return lambda scores, v: scores.softmax(-1).to(format).to(v.dtype) @ v


def before_division(format):
    def rounded(scores, v):
        p = (scores - scores.detach().amax(-1, keepdim=True)).exp()
        return p.to(format).to(v.dtype) @ v / p.sum(-1, keepdim=True)

    return rounded


@pytest.mark.parametrize("how", [of_p, before_division])
@pytest.mark.parametrize(
    ("format", "name"), [(torch.bfloat16, "BF16"), (torch.float16, "FP16")], ids=["bf16", "fp16"]
)
def test_weights_that_are_rounded_are_told_with_their_format(how, format, name):
    said = quick(attending(how(format)), "fp32", cells=FEW).sentence
    assert f"out errs as of weights P that are rounded to {name} before P @ v" in said


@pytest.mark.parametrize(
    "other", [{"of_qk": torch.bfloat16}, {"noise": 0.01}], ids=["of q and k too", "noise"]
)
def test_where_more_is_wrong_no_rounding_of_the_weights_is_told(other):
    said = quick(attending(of_p(torch.bfloat16), **other), "fp32", cells=FEW).sentence
    assert "FAILS" in said
    assert "weights P" not in said
