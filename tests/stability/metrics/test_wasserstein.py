"""W1 is scipy's, and keeps the laws of a distance between distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import wasserstein_distance

from stability.metrics.wasserstein import wasserstein_1d

VALUES = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0])
SAMPLES = hnp.arrays(np.float32, st.integers(1, 40), elements=VALUES)
PAIRS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=VALUES)] * 2)
)
modest = settings(deadline=None, max_examples=200)


@modest
@given(SAMPLES, SAMPLES)
def test_w1_is_scipys_for_any_sizes(a, b):
    scale = float(max(np.abs(a).max(), np.abs(b).max(), 1e-30))
    expected = wasserstein_distance(a, b)
    found = wasserstein_1d(torch.from_numpy(a), torch.from_numpy(b))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13 * scale)


@modest
@given(PAIRS, st.randoms(use_true_random=False))
def test_w1_is_blind_to_position_and_at_most_the_mean_difference(pair, random):
    a, b = (torch.from_numpy(x) for x in pair)
    order = list(range(len(a)))
    random.shuffle(order)
    assert wasserstein_1d(a[order], b) == wasserstein_1d(a, b) == wasserstein_1d(b, a)
    assert wasserstein_1d(a, a[order]) == 0.0
    mean_abs = float((a.double() - b.double()).abs().mean())
    assert wasserstein_1d(a, b) <= mean_abs * (1 + 1e-12)


def test_w1_of_a_shift_is_the_shift():
    a = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert wasserstein_1d(a, a + 0.25) == pytest.approx(0.25, rel=1e-13)


def test_w1_keeps_differences_of_one_ulp_among_a_million_values():
    a = torch.ones(2**20 + 3)
    b = torch.nextafter(a, torch.tensor(2.0))
    assert wasserstein_1d(a, b) == 2.0**-23


def test_w1_of_fp64_sees_what_fp32_cannot():
    a = torch.ones(5, dtype=torch.float64)
    assert wasserstein_1d(a, a + 1e-12) == pytest.approx(1e-12, rel=1e-3)


def test_inputs_are_unchanged_whatever_their_layout():
    a = torch.arange(12.0).flip(0).reshape(3, 4).mT
    before = a.clone()
    wasserstein_1d(a, a + 1)
    assert torch.equal(a, before)


def test_nan_gives_nan_and_infinity_stays_infinite():
    a, nan, inf = torch.zeros(3), torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0, 1, math.inf])
    assert math.isnan(wasserstein_1d(a, nan))
    assert math.isnan(wasserstein_1d(nan, a[:2]))
    assert wasserstein_1d(a, inf) == wasserstein_1d(a, inf[:2].repeat(2) + inf[2]) == math.inf


def test_empty_is_refused():
    with pytest.raises(ValueError, match="a and b must hold values, got 0 and 3"):
        wasserstein_1d(torch.empty(0), torch.zeros(3))


def test_infinite_values_of_one_sign_match_each_other():
    a = torch.tensor([math.inf, 0.0, -math.inf])
    assert wasserstein_1d(a, a) == 0.0
    assert wasserstein_1d(a, torch.tensor([-math.inf, math.inf, 3.0])) == 1.0
    assert wasserstein_1d(a, a.repeat(2)) == 0.0


@pytest.mark.parametrize(("n", "m"), [(100_003, 100_003), (100_003, 70_001), (65_536, 32_768)])
def test_w1_of_many_values_is_scipys(n, m):
    generator = torch.Generator().manual_seed(n + m)
    a = torch.randn(n, generator=generator)
    b = torch.randn(m, generator=generator).round(decimals=1) * 1e30
    for x, y in ((a, b), (1e30 * a, b)):
        expected = wasserstein_distance(x.numpy(), y.numpy())
        assert wasserstein_1d(x, y) == pytest.approx(expected, rel=1e-10)


def test_narrow_formats_are_taken_at_their_exact_values():
    a = torch.tensor([1.0, 3.0]).bfloat16()
    b = torch.tensor([1.0, 3.0 + 2.0**-30], dtype=torch.float64)
    assert wasserstein_1d(a, b) == 2.0**-31


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"must be floating-point, got torch.int64; convert"):
        wasserstein_1d(torch.zeros(2), torch.zeros(2, dtype=torch.int64))
