"""A check finds what is wrong with a dropout whose stream it does not know."""

import itertools
import math
import re

import pytest
import torch

from attention_kernels import baseline_attention, flash_attention
from attention_kernels.testing import check_attention
from attention_kernels.testing.cells import QUICK
from attention_kernels.testing.dropped_weights import P, dropout_findings

BF16 = torch.bfloat16
CALLS = itertools.count()


def flash(q, k, v, *, causal=False, scale=None, dropout_p=0.0, dropout_seed=None):
    options = {"dropout_p": dropout_p, "dropout_seed": dropout_seed}
    return flash_attention(q, k, v, causal=causal, scale=scale, **options)


def by_hand(keep, weigh=lambda p, kept: p * kept / (1 - P)):
    """An attention in FP32 that drops by `keep(seed, shape)`, from torch's generator."""

    def attend(q, k, v, *, causal=False, scale=None, dropout_p=0.0, dropout_seed=None):
        dtype, group = q.dtype, q.shape[1] // k.shape[1]
        q, k, v = (x.float() for x in (q, k, v))
        k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            ahead = torch.ones(scores.shape[-2:]).triu(1 + k.shape[2] - q.shape[2]) > 0
            scores = scores.masked_fill(ahead, -torch.inf)
        p = scores.softmax(-1).nan_to_num()
        if dropout_p:
            p = weigh(p, keep(dropout_seed, p.shape))
        return (p @ v).to(dtype)

    return attend


def draws(seed, shape, dropped=P):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) >= dropped


def found(attention, dtype=BF16):
    return list(dropout_findings(attention, "causal", dtype))


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("attention", [flash, by_hand(draws)], ids=["ours", "torch's stream"])
def test_right_dropout_of_any_stream_passes(attention, dtype):
    assert found(attention, dtype) == []


class _NoScaleBackward(torch.autograd.Function):
    """P keep / (1 - p) forward, and keep alone backward."""

    @staticmethod
    def forward(ctx, p, kept):
        ctx.save_for_backward(kept)
        return p * kept / (1 - P)

    @staticmethod
    def backward(ctx, *grads):
        (kept,) = ctx.saved_tensors
        return grads[0] * kept, None


def renormalised(p, kept):
    p = p * kept
    return p / p.sum(-1, keepdim=True).clamp(min=1e-30)


def without_dropout(q, k, v, *, causal=False, scale=None, dropout_p=0.0, dropout_seed=None):
    return baseline_attention(q, k, v, causal=causal, scale=scale)


WRONG = {
    "unscaled": (by_hand(draws, lambda p, kept: p * kept), "out", "not divided by 1 - p"),
    "renormalised": (by_hand(draws, renormalised), "out", "divided by their own sum"),
    "backward unscaled": (by_hand(draws, _NoScaleBackward.apply), "dq", "errs"),
    "rate": (by_hand(lambda s, n: draws(s, n, 0.2)), "out", "drops 0.2 of the weights where dro"),
    "off": (without_dropout, "out", "drops 0 of the weights where dropout_p is 0.25"),
    "seed ignored": (
        by_hand(lambda s, n: draws(1, n)),
        "out",
        "alike 1 of .* another dropout_seed",
    ),
    "heads alike": (
        by_hand(lambda s, n: draws(s, (n[0], 1, *n[2:])).expand(n)),
        "out",
        "alike 1 of the weights of another head; chance is 0.625",
    ),
    "batches alike": (
        by_hand(lambda s, n: draws(s, (1, *n[1:])).expand(n)),
        "out",
        "alike 1 of the weights of another batch entry",
    ),
    "rows alike": (
        by_hand(lambda s, n: draws(s, (*n[:2], 1, n[3])).expand(n)),
        "out",
        "alike 1 of the weights of the row above",
    ),
    "not repeatable": (
        by_hand(lambda s, n: draws(next(CALLS), n)),
        "out",
        "other weights when it is called again with the same dropout_seed",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_said(case):
    attention, result, words = WRONG[case]
    first, *_ = found(attention)
    assert first.result == result
    assert first.value > 3
    assert re.search(words, first.sentence), first.sentence


def test_only_the_backward_is_blamed_where_the_forward_is_right():
    findings = found(WRONG["backward unscaled"][0])
    assert {finding.result for finding in findings} == {"dq", "dk"}
    assert all(math.isfinite(finding.value) for finding in findings)


def test_what_refuses_dropout_says_why_and_what_names_none_is_not_called():
    def refuses(q, k, v, *, causal=False, dropout_p=0.0, dropout_seed=None):
        raise NotImplementedError("no dropout here")

    assert found(refuses) == ["dropout: NotImplementedError: no dropout here"]
    assert found(lambda q, k, v, *, causal, dropout_p=0.0: pytest.fail("called")) == []
    assert found(torch.nn.functional.scaled_dot_product_attention) == []


def test_weights_that_are_rounded_to_zero_are_not_taken_for_dropped():
    coarse = by_hand(draws, lambda p, kept: p * (p > 0.002))

    def attend(q, k, v, *, causal=False, dropout_p=0.0, dropout_seed=None):
        return coarse(q, k, v, dropout_p=P, dropout_seed=dropout_seed)

    (said,) = found(attend)
    assert said.startswith("dropout: some weights are 0 where none is dropped, so it can't be seen")


@pytest.mark.parametrize("cells", [QUICK[:1], pytest.param(QUICK, marks=pytest.mark.slow)])
def test_the_check_reports_it(cells):
    report = check_attention(flash, dtypes=["bf16"], cells=cells)
    assert report.passed, report.sentence
    report = check_attention(WRONG["unscaled"][0], dtypes=["bf16"], cells=cells)
    assert "bf16: out errs" in report.sentence
    assert "the weights that are kept are not divided by 1 - p" in report.sentence
    assert {finding.what for finding in report.findings} == {"dropout"}
