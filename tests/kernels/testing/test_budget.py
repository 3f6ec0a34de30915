"""The budget that users gate their own kernels with fails when it should."""

import subprocess
import sys

import pytest
import torch

from attention_kernels.testing import assert_within_budget, error_budget, nan_filled

GOLDEN = torch.tensor([1.0, -1.5], dtype=torch.float64)


def shifted(by, dtype=torch.float32):
    return (GOLDEN + by).to(dtype)


def test_the_budget_is_the_factor_times_the_baselines_error():
    assert_within_budget(shifted(0.25), shifted(0.125), GOLDEN, factor=2)
    with pytest.raises(AssertionError, match=r"dq: max error 2.500e-01 is over the budget 1.250e"):
        assert_within_budget(shifted(0.25), shifted(0.125), GOLDEN, factor=1, what="dq")


def test_the_budget_is_a_number_as_well():
    # 2 * 0.125 of the baseline, and half of 2^-7, BF16's spacing at 1.5
    assert error_budget(shifted(0.125), GOLDEN, torch.bfloat16) == 0.25 + 2**-8


def test_a_correctly_rounded_candidate_passes_beside_an_exact_baseline():
    golden = torch.tensor([1 + 2**-8], dtype=torch.float64)  # the middle of two BF16 values
    assert_within_budget(golden.bfloat16(), golden, golden)
    wrong = torch.tensor([1 + 2**-7 + 2**-7], dtype=torch.bfloat16)
    with pytest.raises(AssertionError, match=r"out: .* of the baseline \+ 3.906e-03 of rounding"):
        assert_within_budget(wrong, golden, golden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_beside_a_golden_of_zeros_the_budget_is_half_the_least_subnormal(dtype):
    zeros = torch.zeros(3, dtype=torch.float64)
    finest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert error_budget(zeros, zeros, dtype) == finest / 2
    with pytest.raises(AssertionError, match=r"dq: max error 1\.000e-03"):
        assert_within_budget(torch.full((3,), 1e-3), zeros, zeros, what="dq")


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_candidate_that_is_not_finite_always_fails(value):
    with pytest.raises(AssertionError, match="out: max error"):
        assert_within_budget(torch.full((2,), value), shifted(0.5), GOLDEN, factor=1e9)


def test_uninitialised_memory_is_nan_inside_and_restored_after():
    before = torch.empty
    with nan_filled():
        x = torch.ones(3)
        for made in (torch.empty(3), torch.empty_like(x), x.new_empty(3)):
            assert made.isnan().all()
        assert torch.empty_strided((2, 2), (1, 2)).isnan().all()
        assert torch.empty(3, dtype=torch.int32).dtype == torch.int32
    assert torch.empty is before


def test_a_device_of_a_later_context_is_taken():
    # in a process of its own: torch remembers once in each which functions make tensors
    code = """
import torch
from attention_kernels.testing import nan_filled
with nan_filled(), torch.device("cpu"):
    torch.zeros(2)
with torch.device("meta"):
    print(torch.empty(2).device)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "meta"
