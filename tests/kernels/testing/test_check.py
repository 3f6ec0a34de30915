"""A check passes what is right, fails what is wrong, and says what is wrong with it."""

import re
from dataclasses import replace

import pytest
import torch

from attention_kernels.testing import Shape, check_attention, plant
from attention_kernels.testing.cells import DTYPES, reference
from attention_kernels.testing.check import _row
from attention_kernels.testing.laws import draw
from attention_kernels.testing.measured import measure
from tests.kernels.testing.checked import EMPTY_ROWS, FEW, PLAIN, UNEQUAL, golden, plain, quick


@pytest.mark.parametrize("dtype", DTYPES)
def test_plain_attention_and_golden_pass(dtype):
    for attention in (plain, golden):
        report = quick(attention, dtype, FEW)
        assert report.passed, report.sentence


@pytest.mark.parametrize(
    ("fault", "dtype", "said"),
    [
        ("scale_gain", "bf16", "the softmax scale is 1.005"),
        ("dk_gain", "bf16", "dk is 1.00"),
        ("delta_off", "fp16", r"delta = rowsum\(dO \* O\) is 0.95"),
        ("dropped_key", "bf16", "keys 31, 63 are missed|key 31 is missed|keys 31, 63"),
        ("causal_leak", "fp32", r"causal mask lets row i see key i\+1"),
        ("stale_block", "fp32", "a stale block: tile 1 of 32 keys"),
    ],
)
def test_a_planted_fault_is_found_and_named(fault, dtype, said):
    report = quick(plant(plain, fault), dtype, FEW)
    assert not report.passed
    assert re.search(said, report.sentence), report.sentence


def _with_empty_rows(fill, gain=1.0):
    """Plain attention, `fill` in rows that attend no key, and a factor on all the others."""

    def attention(q, k, v, *, causal, scale=None):
        out = gain * plain(q, k, v, causal=causal, scale=scale)
        missing = q.shape[2] - k.shape[2] if causal else 0
        return (
            out if missing <= 0 else torch.cat([fill(out[:, :, :missing]), out[:, :, missing:]], 2)
        )

    return attention


def test_a_row_that_attends_no_key_must_be_zero_whatever_is_there_instead():
    said = {
        what: quick(_with_empty_rows(fill), cells=[*FEW, *EMPTY_ROWS]).sentence
        for what, fill in {
            "sevens": lambda rows: torch.full_like(rows, 7.0),
            "no number": lambda rows: torch.full_like(rows, torch.nan),
        }.items()
    }
    wanted = (
        "rows that attend no key hold other values, and must be 0: empty rows, in every head (s"
    )
    assert wanted in said["sevens"]
    assert re.search(
        r"NaN in out in the rows that attend .* which must be 0, in 1 of", said["no number"]
    )


def test_empty_rows_are_not_blamed_for_what_is_wrong_elsewhere():
    sevens = _with_empty_rows(lambda rows: torch.full_like(rows, 7.0), gain=1.5)
    for cells in (EMPTY_ROWS, [*FEW, *EMPTY_ROWS]):
        assert "hold other values" not in quick(sevens, cells=cells).sentence


def test_what_is_refused_is_listed_and_all_of_it_is_no_pass():
    def equal_lengths(q, k, v, *, causal, scale=None):
        if q.shape[2] != k.shape[2]:
            raise NotImplementedError("query_len other than key_len")
        return plain(q, k, v, causal=causal, scale=scale)

    def nothing(q, k, v, *, causal, scale=None):
        raise ValueError("dtype must be float64, got torch.bfloat16")

    report = quick(equal_lengths, cells=[*FEW, *UNEQUAL])
    assert report.passed
    assert list(report.unsupported) == ["query_len other than key_len"]
    assert f"it refuses {len(UNEQUAL)} more: 'query_len other than key_len'" in report.sentence
    assert not report.plain_refused
    report = quick(nothing, cells=FEW)
    assert not report.passed
    assert not report.cells
    assert report.sentence.endswith(
        "nothing was looked at: dtype must be float64, got torch.bfloat16"
    )


def test_plain_attention_refused_stands_in_the_answer():
    def causal_alone(q, k, v, *, causal, scale=None):
        if not causal:
            raise ValueError("only causal=True is supported, got False")
        return plain(q, k, v, causal=causal, scale=scale)

    report = quick(causal_alone, cells=[*FEW, *PLAIN])
    assert report.passed
    assert "it refuses 2 more, 1 of them plain attention (bf16, normal" in report.sentence
    assert report.to_dict()["plain_refused"] == [f"bf16, {PLAIN[1]}"]


def test_a_dtype_that_is_refused_is_not_said_to_pass():
    def narrow(q, k, v, *, causal, scale=None):
        if q.dtype == torch.float32:
            raise NotImplementedError("FP32")
        return plain(q, k, v, causal=causal, scale=scale)

    report = check_attention(narrow, dtypes=["bf16", "fp32"], cells=PLAIN)
    assert " passes the check at bf16 in 2 cells; it refuses 2 more, 2 of them plain" in (
        report.sentence
    )


def test_an_error_that_no_mistake_explains_is_said_to_be_unexplained():
    def coarse(q, k, v, *, causal, scale=None):
        out = plain(q, k, v, causal=causal, scale=scale)
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
        return out + (0.1 * noise).to(out.dtype)

    sentence = quick(coarse, cells=FEW).sentence
    assert "nothing known explains it" in sentence
    assert "too coarse" not in sentence


def test_no_cells_are_no_pass():
    assert not quick(plain, cells=[]).passed


def test_an_unknown_dtype_is_refused():
    with pytest.raises(ValueError, match="dtypes must be among bf16, fp16, fp32, got 'int8'"):
        quick(plain, "int8")
    with pytest.raises(ValueError, match="dtypes must differ, got bf16, bf16"):
        check_attention(plain, dtypes=["bf16", "bf16"])


def test_given_inputs_are_checked_too():
    given = draw("normal", Shape(2, 2, 2, 70, 70, 16), torch.float32, seed=0)
    report = quick(plain, cells=[], given=given)
    assert report.passed
    assert {row["law"] for row in report.statistics} == {"given inputs"}


def test_the_bias_of_a_result_is_the_judged_one_and_not_a_single_cells():
    report = quick(plain, "fp32", FEW)
    assert report.passed
    biases = {row["result"]: row for row in report.to_dict()["biases"]}
    assert [*biases] == ["out", "dq", "dk", "dv"], "the LSE's is not judged"
    for name, row in biases.items():
        # below 4 standard errors whatever plain attention's own: nothing is surely there
        assert abs(row["value"]) < row["limit"] + 4 * row["error"], name
        single = max(
            abs(x) for y in report.statistics if y["result"] == name for x in y["bias_ulp"]
        )
        assert abs(row["value"]) <= single + 1e-12, name

    biased = quick(plant(plain, "bias_tenth_ulp"), "bf16", FEW)
    (row,) = (x for x in biased.biases if x["result"] == "out")
    assert row["value"] == pytest.approx(0.1, abs=4 * row["error"])
    assert row["error"] < 0.02


def test_the_scatter_of_an_error_ratio_is_of_the_batch_entry_that_errs_most():
    where = reference(FEW[0], torch.float32)
    one = measure(where, "out", where.baseline["out"])
    errors = 100 * torch.ones_like(one.squared_errors)
    errors[0] = 0.0
    errors[0, :, 3] = 1.0  # in a single row: far less, and all of it scatter
    row = _row("fp32", replace(one, squared_errors=errors, squared_noise=torch.ones_like(errors)))
    assert row["error_ratio"] == pytest.approx([10.0, 10.0])
    assert max(row["error_ratio_error"]) < 1.0
