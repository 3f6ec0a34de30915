"""An attention that takes (batch, tokens, heads, head_dim) is told so, and no other is."""

import pytest
import torch

from attention_kernels.testing import FAULT_NAMES, Shape, check_attention, plant
from attention_kernels.testing.cells import DTYPES, Cell
from attention_kernels.testing.devices import CPU
from attention_kernels.testing.layout import layout_sentence
from tests.kernels.testing.checked import FA2, FEW, PLAIN, UNEQUAL, golden, plain, quick

TOLD = (
    "it takes (batch, tokens, heads, head_dim): q, k and v come as (batch, heads, tokens, head_dim)"
)


def _by_tokens(q, k, v, *, causal, scale=None):
    """Plain attention in flash-attn's layout, with a mask of one length for queries and keys."""
    dtype, group = q.dtype, q.shape[2] // k.shape[2]
    q, k, v = (x.float().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        scores = scores + torch.full([q.shape[2]] * 2, -torch.inf).triu(1)
    return (scores.softmax(-1) @ v).transpose(1, 2).to(dtype)


def _swapped(q, k, v, *, causal, scale=None):
    """Plain attention, for inputs of flash-attn's layout."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return plain(q, k, v, causal=causal, scale=scale).transpose(1, 2)


def _with_lse(q, k, v, *, causal, scale=None):
    return _swapped(q, k, v, causal=causal, scale=scale), torch.zeros(q.shape[:3])


def _in_its_order(q, k, v, *, causal, scale=None):
    for x in (q, k, v):
        assert x.is_contiguous(), "strides"
    return _swapped(q, k, v, causal=causal, scale=scale)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", [_by_tokens, _with_lse, _in_its_order])
def test_flash_attns_layout_is_what_the_answer_says_first(attention, dtype):
    report = quick(attention, dtype, cells=[*FEW, *PLAIN])
    assert f"FAILS at {dtype}: {TOLD}; with each" in report.sentence
    assert [finding.what for finding in report.findings] == ["layout"]


def test_it_is_told_of_all_dtypes_at_once_though_some_cells_raise():
    cells = [*FEW, *PLAIN, *UNEQUAL]
    report = check_attention(_by_tokens, dtypes=["bf16", "fp32"], cells=cells)
    assert f" FAILS at bf16, fp32: {TOLD}" in report.sentence
    # errors of shapes that its own layout does not have are none of its own
    assert [finding.dtypes for finding in report.findings] == [("bf16", "fp32")]


def test_in_a_dtype_in_which_the_layout_explains_nothing_the_findings_stay():
    def wrong_in_bf16(q, k, v, *, causal, scale=None):
        factor = 1.5 if q.dtype == torch.bfloat16 else 1.0
        return factor * _swapped(q, k, v, causal=causal, scale=scale)

    report = check_attention(wrong_in_bf16, dtypes=["bf16", "fp32"], cells=PLAIN)
    assert report.findings[0].dtypes == ("fp32",)
    assert TOLD in report.findings[0].sentence
    assert "bf16" in {dtype for finding in report.findings[1:] for dtype in finding.dtypes}


def test_a_kernel_that_takes_no_full_mask_is_told_too():
    def causal_alone(q, k, v, *, causal, scale=None):
        if not causal:
            raise NotImplementedError("only causal")
        return _swapped(q, k, v, causal=causal, scale=scale)

    assert TOLD in quick(causal_alone, cells=PLAIN).sentence


@pytest.mark.parametrize("fault", FAULT_NAMES)
def test_of_a_planted_fault_no_layout_is_told(fault):
    assert layout_sentence(plant(plain, fault), "bf16", CPU) == ""


@pytest.mark.parametrize("attention", [plain, golden, FA2])
def test_of_the_usual_layout_none_is_told(attention):
    assert layout_sentence(attention, "bf16", CPU) == ""


def test_an_attention_that_takes_either_layout_is_wrong_about_some_other_thing():
    def guesses(q, k, v, *, causal, scale=None):
        wrong = q.shape[2] == 70
        attend = plain if q.shape[1] <= q.shape[2] else _swapped
        return attend(q, k, v, causal=causal, scale=scale) * (1.5 if wrong else 1.0)

    report = quick(guesses, cells=FEW)
    assert not report.passed
    assert "(batch, tokens" not in report.sentence


def test_as_many_heads_as_tokens_do_not_hide_the_layout():
    square = [Cell(law="normal", shape=Shape(2, 16, 16, 16, 16, 64), causal=True)]
    assert TOLD in quick(_swapped, cells=square).sentence
