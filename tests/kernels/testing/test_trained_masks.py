"""A check calls an attention that takes attn_mask or sinks with trained ones."""

import math

import pytest
import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.testing.calls import Signature
from attention_kernels.testing.cells import DTYPES
from attention_kernels.testing.trained_masks import trained_mask_findings
from tests.kernels.testing.checked import ONE, Turned, quick


def flash(q, k, v, *, causal, scale=None, attn_mask=None, sinks=None):
    masks = {"causal": causal, "scale": scale, "attn_mask": attn_mask, "sinks": sinks}
    return flash_attention(q, k, v, numerics=PROFILES["fa2"], **masks)


def wrong(fault):
    def attend(q, k, v, *, causal, scale=None, attn_mask=None, sinks=None):
        if fault == "not summed" and attn_mask is not None:
            size = (len(q), *attn_mask.shape[1:])
            # of each batch entry the gradient is right; all but the first are dropped
            attn_mask = Turned.apply(attn_mask.expand(size), lambda g: g * _first(g))
        if fault == "twice" and sinks is not None:
            sinks = sinks + math.log(2)
        if fault == "twice, backward" and sinks is not None:
            sinks = Turned.apply(sinks, lambda g: 2 * g)
        if fault == "one head" and attn_mask is not None:
            factor = torch.tensor([1, 1, 1.2, 1])[:, None, None]
            attn_mask = Turned.apply(attn_mask, lambda g: g * factor.to(g.dtype))
        if fault == "detached" and attn_mask is not None:
            attn_mask = attn_mask.detach()
        if fault == "refused" and sinks is not None:
            raise ValueError("sinks must be constants")
        return flash(q, k, v, causal=causal, scale=scale, attn_mask=attn_mask, sinks=sinks)

    return attend


def _first(x):
    return (torch.arange(len(x)) == 0)[:, None, None, None]


def found(attention, dtype):
    causal = Signature(attention, None).causal
    return list(trained_mask_findings(attention, causal, DTYPES[dtype]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_right_attentions_pass(dtype):
    def plain(q, k, v, *, is_causal, attn_mask=None, sinks=None):
        return baseline_attention(q, k, v, causal=is_causal, attn_mask=attn_mask, sinks=sinks)

    def exact(q, k, v, *, causal, attn_mask=None, sinks=None):
        out = golden_attention(q, k, v, causal=causal, attn_mask=attn_mask, sinks=sinks)
        return out.to(q.dtype)

    for attention in (flash, plain, exact):
        assert found(attention, dtype) == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("fault", "result", "words"),
    [
        ("not summed", "dbias", "of the first batch entry alone, not summed over the batch"),
        ("twice", "out", "the sink counts twice"),
        ("twice, backward", "dsinks", "dsinks errs"),
        ("one head", "dbias", "in head 2"),
        ("detached", "dbias", "dbias is missing where attn_mask is trained, and must be"),
    ],
)
def test_a_mistake_is_told_in_its_result(fault, result, words, dtype):
    told = {one.result: one.sentence for one in found(wrong(fault), dtype)}
    assert words in told[result]


def test_a_refusal_is_no_failure_and_is_told():
    (said,) = found(wrong("refused"), "fp32")
    assert said == "trained sinks: ValueError: sinks must be constants"


def test_the_check_fails_by_it_and_an_attention_without_such_arguments_is_left_alone():
    report = quick(wrong("not summed"), cells=ONE)
    assert not report.passed
    assert [x.noun for x in report.findings] == ["dbias"]
    assert quick(flash, cells=ONE).passed
    assert found(lambda q, k, v, causal: pytest.fail("called"), "bf16") == []
