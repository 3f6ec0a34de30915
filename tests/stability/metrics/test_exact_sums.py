"""Sums are exact: rational arithmetic gives the same; no order, shard or engine changes a bit."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from stability.metrics.exact_sums import (
    ExactSum,
    PairSums,
    add_by_torch,
    pair_sums,
    sum_of_bins,
)
from stability.metrics.exact_sums import _add_on_cpu as add_on_cpu

SUMS = ("b", "abs_error", "a_square", "b_square", "error_square")


def pairs(width: int, **limits):
    value = st.floats(width=width, **limits)
    return st.lists(st.tuples(value, value), min_size=1, max_size=40)


def tensors(values, dtype) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = zip(*values, strict=True)
    return torch.tensor(a, dtype=dtype), torch.tensor(b, dtype=dtype)


def exactly(terms) -> float:
    """The sum of FP64 numbers in rational arithmetic, rounded once."""
    return float(sum(map(Fraction, terms), Fraction(0)))


@settings(max_examples=200)
@given(pairs(32, allow_nan=False, allow_infinity=False))
@example([(1e38, -1e38), (1e-45, -1e-45), (1.0, 1.0)])
def test_sums_of_fp32_are_those_of_rational_arithmetic(values):
    a, b = tensors(values, torch.float32)
    x, y = a.double().tolist(), b.double().tolist()
    errors = [p - q for p, q in zip(x, y, strict=True)]
    found = pair_sums(a, b)
    assert float(found.b) == exactly(y)
    assert float(found.abs_error) == exactly(map(abs, errors))
    assert float(found.a_square) == exactly(p * p for p in x)
    assert float(found.b_square) == exactly(q * q for q in y)
    assert float(found.error_square) == exactly(e * e for e in errors)
    assert found.max_abs == max(map(abs, errors))
    assert found.flips == sum((p > 0 > q) or (p < 0 < q) for p, q in zip(x, y, strict=True))
    assert found.count == len(values)
    mean = sum(map(Fraction, y)) / len(y)
    assert found.b_variance == float(sum((Fraction(q) - mean) ** 2 for q in y) / len(y))


@settings(max_examples=200)
@given(pairs(64), st.randoms(use_true_random=False), st.integers(0, 40))
def test_no_order_shard_or_engine_changes_a_bit(values, random, cut):
    shuffled = random.sample(values, len(values))
    whole = pair_sums(*tensors(values, torch.float64))
    for parts in ([values], [shuffled], [shuffled[:cut], shuffled[cut:]]):
        joined = sum((pair_sums(*tensors(x, torch.float64)) for x in parts if x), PairSums())
        assert repr(joined) == repr(whole)  # a NaN is unequal to itself
    a, b = tensors(shuffled, torch.float64)
    (bins, *others), (by_torch, *others_by_torch) = add_on_cpu(a, b), add_by_torch(a, b)
    assert np.array_equal(bins, by_torch)
    assert repr(others) == repr(others_by_torch)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_engines_agree_on_many_values_of_all_sizes(dtype):
    generator = torch.Generator().manual_seed(0)
    powers = torch.randint(-40, 40, (50_000,), generator=generator)
    a = (torch.randn(50_000, generator=generator, dtype=dtype)).ldexp(powers).to(dtype)
    b = a + a.roll(1) * 2**-20
    assert np.array_equal(add_on_cpu(a, b)[0], add_by_torch(a, b)[0])


def test_carried_halves_lose_nothing(monkeypatch):
    generator = torch.Generator().manual_seed(1)
    a, b = torch.randn(2, 10_000, generator=generator)
    whole = pair_sums(a, b)
    monkeypatch.setattr("stability.metrics.exact_sums._CHUNK", 97)
    monkeypatch.setattr("stability.metrics.exact_sums._BATCH", 31)
    assert pair_sums(a, b) == whole
    joined = [[sum_of_bins(bins) for bins in add(a, b)[0]] for add in (add_by_torch, add_on_cpu)]
    assert joined[0] == joined[1]


def test_the_spread_of_fp64_values_around_a_large_mean_is_told():
    values = 1 + 1e-9 * torch.randn(1000, generator=torch.Generator().manual_seed(0)).double()
    found = pair_sums(values, values)
    exact = values.tolist()
    mean = sum(map(Fraction, exact)) / 1000
    spread = float(sum((Fraction(x) - mean) ** 2 for x in exact) / 1000)
    assert found.b_variance == pytest.approx(spread, rel=1e-12)
    constant = torch.full((77,), 0.1, dtype=torch.float64)
    assert pair_sums(constant, constant).b_variance == 0.0


@pytest.mark.parametrize(
    ("terms", "total"),
    [
        ([math.inf], math.inf),
        ([math.inf, -math.inf], math.nan),
        ([-math.inf, 1.0], -math.inf),
        ([math.nan, math.inf], math.nan),
    ],
)
def test_what_is_not_finite_is_carried(terms, total):
    b = torch.tensor(terms)
    found = pair_sums(torch.ones_like(b), b)
    assert float(found.b) == pytest.approx(total, nan_ok=True)
    assert not math.isfinite(float(found.abs_error))
    assert not math.isfinite(found.max_abs)
    assert float(found.a_square) == len(terms)
    for each in (found, found + pair_sums(torch.ones(3), torch.ones(3))):
        assert not math.isfinite(each.b_variance)
        assert not math.isfinite(each.dot)


def test_a_sum_beyond_fp64_is_infinite():
    most = torch.full((4,), 1.7e308, dtype=torch.float64)
    assert float(pair_sums(most, -most).b) == -math.inf
    assert float(ExactSum(units=1)) == 5e-324


def test_the_least_numbers_of_fp64_are_added_up():
    least = torch.tensor([5e-324, 2.5e-308, 1.5e-323], dtype=torch.float64)
    assert float(pair_sums(least, least).b) == exactly(least.tolist())
    assert float(pair_sums(least[::2].clone(), least[::2].clone()).b) == 2e-323


@pytest.mark.parametrize("value", [1.1e-150, 1.3e-150, 1.7e-150, 1.9e150, 1.3e150])
def test_equal_values_whose_squares_can_not_be_split_have_no_spread_below_0(value):
    constant = torch.full((7,), value, dtype=torch.float64)
    assert 0 <= pair_sums(constant, constant).b_variance <= 1e-15 * value**2
