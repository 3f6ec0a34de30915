"""Mismatches are counted as the two rules count them."""

import re

import pytest
import torch

from experiments.kit.mismatches import Mismatches, mismatches, together

GOLDEN = torch.tensor([1.0, -1.5, 0.25, 0.0], dtype=torch.float64)


def test_an_element_is_outside_past_twice_the_plain_error_and_half_a_spacing():
    plain = GOLDEN + torch.tensor([0.0, 2.0**-6, 0.0, 0.0])
    budget = 2 * 2.0**-6 + 2.0**-8
    at_limit = (GOLDEN + torch.tensor([0.03125, 0.03125, 0.0, budget])).bfloat16()
    assert mismatches(at_limit, plain, GOLDEN)[1] == 0
    over = (GOLDEN + torch.tensor([0.0, 0.0, 0.0, 1.01 * budget])).bfloat16()
    found = mismatches(over, plain, GOLDEN)
    assert (found.elements, found.outside) == (4, 1)
    assert found.max_abs == over[3].item()
    assert found.of_budget == pytest.approx(found.max_abs / budget)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_not_close_is_what_assert_close_reports(dtype):
    generator = torch.Generator().manual_seed(0)
    golden = torch.randn(1000, dtype=torch.float64, generator=generator)
    noise = torch.randn(1000, dtype=torch.float64, generator=generator)
    x = (golden * (1 + 0.01 * noise)).to(dtype)
    count = mismatches(x, x, golden).not_close
    with pytest.raises(AssertionError) as raised:
        torch.testing.assert_close(x, golden.to(dtype))
    said = re.search(r"Mismatched elements: (\d+) / 1000", str(raised.value))
    assert said
    assert count == int(said.group(1)) > 0


def test_the_rounded_golden_is_close_and_a_nan_is_a_mismatch_by_both():
    x = GOLDEN.bfloat16()
    assert mismatches(x, GOLDEN, GOLDEN)[1:3] == (0, 0)
    x[0] = torch.nan
    assert mismatches(x, GOLDEN, GOLDEN)[1:3] == (1, 1)


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="mismatches: x must be in BF16 or FP16"):
        mismatches(GOLDEN, GOLDEN, GOLDEN)


def test_together_adds_counts_and_takes_the_worst():
    parts = [Mismatches(10, 1, 2, 0.5, 3.0), Mismatches(20, 3, 4, 0.25, 4.0)]
    assert together(parts) == Mismatches(30, 4, 6, 0.5, 4.0)
    with pytest.raises(ValueError, match="together: parts must not be empty"):
        together([])
