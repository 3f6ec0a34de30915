"""The words of a check: which rows are meant, and where a defect is seen."""

import re

import pytest
import torch

from attention_kernels.testing.calls import Breach
from attention_kernels.testing.cells import FULL, QUICK
from attention_kernels.testing.limits import Excess
from attention_kernels.testing.sentences import (
    breach_sentence,
    excess_sentence,
    inputs_in_words,
    rows_in_words,
)
from tests.kernels.testing.checked import EMPTY_ROWS, FEW, UNEQUAL, plain, quick

MAY_REFUSE = "; what it does not support it may refuse by NotImplementedError"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([39], "row 39 of 40, the last row"),
        ([7], "row 7 of 40"),
        ([36, 37, 38, 39], "rows 36 to 39, the tail of 40"),
        ([3, 4, 5], "rows 3 to 5 of 40"),
        ([8, 4, 12], "rows 4, 8 and 12, 4 apart, of 40"),
        ([1, 3], "rows 1 and 3, 2 apart, of 40"),
        ([1, 3, 4], "rows 1, 3 and 4 of 40"),
        (list(range(36)), "every row"),
        ([], "every row"),
    ],
)
def test_rows_are_told_by_their_pattern(rows, said):
    assert rows_in_words(rows, 40) == said


def _grouped(cell):
    return cell.shape.kv_heads < cell.shape.heads


def _unequal(cell):
    return cell.shape.query_len != cell.shape.key_len


@pytest.mark.parametrize("cells", [QUICK, FULL], ids=["quick", "full"])
@pytest.mark.parametrize(
    ("fails", "common"),
    [
        (_grouped, "only with GQA, fewer kv heads than heads"),
        (_unequal, "only where query_len != key_len"),
        (lambda cell: not cell.visible().any(-1).all(), "only where a row attends no key"),
        (
            lambda cell: _grouped(cell) or _unequal(cell),
            "only where query_len != key_len, or with GQA, fewer kv heads than heads",
        ),
        (
            lambda cell: cell.scale is not None or bool(cell.strided),
            "only where a scale is given, or on strided inputs, which are not contiguous",
        ),
    ],
)
def test_what_cells_that_raise_have_in_common_is_told(fails, common, cells):
    failing = [cell for cell in cells if fails(cell)]
    breach = Breach(kind="raises", result="out", sentence="raises IndexError", may_refuse=True)
    said = breach_sentence(breach, failing, set(cells))
    at = f"in {len(failing)} of {len(cells)} cells, e.g. {failing[0]}"
    assert said == f"raises IndexError, {at}, {common}{MAY_REFUSE}"
    assert breach_sentence(breach, cells, set(cells)) == "raises IndexError, in every cell"


def test_cells_that_alone_have_another_head_dim_of_v_are_told_by_that():
    def square(q, k, v, *, causal, scale=None):
        return plain(q, k, v, causal=causal, scale=scale).view(q.shape)

    def of_its_own(q, k, v, *, causal, scale=None):
        scale = v.shape[3] ** -0.5 if scale is None else scale
        return plain(q, k, v, causal=causal, scale=scale)

    two = [cell for cell in FULL if cell.shape.value_dim is not None]
    others = [cell for cell in FULL if cell.shape.key_len in (64, 96, 160)]
    for wrong, end in ((square, MAY_REFUSE), (of_its_own, "")):
        said = quick(wrong, cells=[*others, *two]).sentence
        assert said.endswith(f", only where v's head_dim is not q's{end}".lstrip(",")), said


def test_two_traits_are_sought_of_an_error_that_is_raised_alone():
    breach = Breach(kind="not repeatable", result="out", sentence="out is not repeatable")
    failing = [cell for cell in QUICK if _grouped(cell) or _unequal(cell)]
    assert breach_sentence(breach, failing, set(QUICK)).endswith(f"e.g. {failing[0]}")


def test_an_error_in_some_cells_is_told_with_what_a_kernel_may_do_and_a_refusal_is_none():
    def equal_lengths(error):
        def attention(q, k, v, *, causal, scale=None):
            if q.shape[2] != k.shape[2]:
                raise error("lengths")
            return plain(q, k, v, causal=causal, scale=scale)

        return quick(attention, cells=[*FEW, *UNEQUAL])

    failed = equal_lengths(IndexError)
    assert f", only where query_len != key_len{MAY_REFUSE}" in failed.sentence
    refused = equal_lengths(NotImplementedError)
    assert refused.passed
    assert refused.unsupported == {"lengths": [f"bf16, {cell}" for cell in UNEQUAL]}


def test_nan_where_no_key_is_attended_must_be_0_or_may_be_refused():
    def divided_by_zero(q, k, v, *, causal, scale=None):
        empty = max(0, q.shape[2] - k.shape[2]) if causal else 0
        out = plain(q, k, v, causal=causal, scale=scale).clone()
        out[:, :, :empty] = float("nan")
        return out

    said = quick(divided_by_zero, cells=[*FEW, *EMPTY_ROWS]).sentence
    assert "NaN in out in the rows that attend no key, 0, 1, 2, 3, ... (30 in all), " in said
    assert "which must be 0, in 1 of 3 cells" in said
    assert said.endswith(f"only where a row attends no key; dq, dk and dv are right{MAY_REFUSE}")
    everywhere = quick(lambda q, k, v, *, causal: plain(q, k, v, causal=causal) / 0, cells=FEW)
    assert MAY_REFUSE not in everywhere.sentence


@pytest.mark.parametrize(
    ("value", "said"), [(0.5, "0.500 +- 0.010 ULP away from"), (-0.5, "0.500 +- 0.010 ULP toward")]
)
def test_a_bias_is_away_from_zero_or_toward_it_and_never_negative(value, said):
    where = {"heads": (0,), "of_heads": 1, "result": "out", "law": "normal"}
    excess = Excess(statistic="bias away from zero", value=value, error=0.01, limit=0.05, **where)
    assert excess_sentence(excess) == (
        f"out has a bias of {said} zero, in every head, on 'normal' inputs"
    )


def test_a_diagnosed_bias_toward_zero_is_said_to_be_one():
    def truncated(q, k, v, *, causal, scale=None):
        exact = plain(q.float(), k.float(), v.float(), causal=causal, scale=scale)
        cut = (exact.detach().view(torch.int32) & -65536).view(torch.float32)
        return (exact + (cut - exact.detach())).to(q.dtype)

    report = quick(truncated, cells=FEW)
    assert re.search(r"out has a bias of 0\.[45]\d+ \+- 0\.\d+ ULP toward zero", report.sentence)


def test_inputs_of_a_run_are_the_given_ones():
    assert inputs_in_words("rare rows") == "'rare rows' inputs"
    assert inputs_in_words("given inputs") == "the given inputs"
