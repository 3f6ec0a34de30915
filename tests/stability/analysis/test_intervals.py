"""Intervals over a few seeds hold the truth as often as they say, and say when they can't."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, skewnorm, t

from stability.analysis.growth_fit import fit_growth
from stability.analysis.intervals import mean_interval, p_values, paired_interval

INTERVALS = pytest.mark.parametrize("interval", [paired_interval, mean_interval])
POSITIVE = st.floats(1e-6, 1e6)
EITHER_SIGN = st.floats(-1e6, 1e6)
modest = settings(max_examples=60)

REPETITIONS = 200
# where 99 % of Binomial(200, 0.9) lies: 169 to 190 of 200, a share of 0.845 to 0.95. A percentile
# interval, which holds the truth in 0.8 with 5 seeds, is outside.
FEWEST, MOST = binom.interval(0.99, REPETITIONS, 0.9)


def _exp(value):
    return math.exp(value) if value < 709 else math.inf


def by_seed(values):
    return {seed: float(value) for seed, value in enumerate(values)}


def several(values, smallest=5):
    return st.lists(values, min_size=smallest, max_size=9)


@pytest.mark.slow
@pytest.mark.parametrize(
    "steps",
    [[1, 2, 5, 10, 20, 50, 100, 150], list(range(5, 151, 5))],
    ids=["8 log-spaced steps", "30 even steps"],
)
def test_the_interval_of_five_growth_rates_holds_the_true_one_at_its_level(steps):
    rng = np.random.default_rng(0)
    rate, sigma = 0.1, 0.1
    growth = np.expm1(rate * np.asarray(steps))
    saturating = 1e-7 * (1 + growth) / (1 + 1e-5 * growth)
    held = 0
    for _ in range(REPETITIONS):
        drifts = saturating * np.exp(sigma * rng.normal(size=(5, len(steps))))
        found = mean_interval(by_seed(fit_growth(steps, row).rate for row in drifts))
        held += found.low <= rate <= found.high
    assert FEWEST <= held <= MOST


@pytest.mark.parametrize("seeds", [5, 8])
def test_the_interval_of_log_normal_ratios_holds_the_true_one_at_its_level(seeds):
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(REPETITIONS):
        found = paired_interval(by_seed(0.3 * np.exp(0.5 * rng.normal(size=seeds))))
        held += found.low <= 0.3 <= found.high
    assert FEWEST <= held <= MOST


@INTERVALS
@pytest.mark.parametrize("level", [0.9, 0.972])
def test_too_few_seeds_have_a_mean_but_no_interval(interval, level):
    for n in (1, 2):
        found = interval(by_seed([2.0] * n), level)
        assert math.isnan(found.low)
        assert math.isnan(found.high)
        assert (found.mean, found.n, found.level) == (2.0, n, level)
    assert not math.isnan(interval(by_seed([1.0, 2.0, 3.0]), level).low)


@INTERVALS
def test_no_seeds_have_nothing(interval):
    found = interval({})
    assert all(math.isnan(value) for value in (found.low, found.mean, found.high))
    assert found.n == 0


@INTERVALS
@pytest.mark.parametrize("value", [0.0, 0.1, 0.7, 1e-300, 1e300])
def test_equal_seeds_leave_no_doubt(interval, value):
    found = interval(by_seed([value] * 7))
    assert found.low == found.mean == found.high == value


@INTERVALS
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_seed_that_is_no_number_leaves_no_interval(interval, value):
    found = interval(by_seed([1.0, 2.0, value, 3.0, 4.0]))
    assert all(math.isnan(value) for value in (found.low, found.mean, found.high))
    assert found.n == 5


@modest
@given(several(EITHER_SIGN, smallest=3), st.randoms(use_true_random=False))
def test_the_interval_holds_the_mean_whatever_the_order_of_the_seeds(values, random):
    found = mean_interval(by_seed(values))
    edge = 1e-9 * max(map(abs, values))  # of rounding, in means of up to 9 values
    assert found.low - edge <= found.mean <= found.high + edge
    assert found.mean == pytest.approx(np.mean(values), abs=edge)
    random.shuffle(values)
    assert mean_interval(by_seed(values)) == found


@modest
# a third of the values is one value: of its resamples some had a standard error of 1e-17
@example([1.0, 205768.0, 205768.0, 205768.0, 257571.0, 428455.0, 728497.0, 760076.0, 947093.0], 6.0)
@given(several(POSITIVE), st.floats(1e-3, 1e3))
def test_the_interval_of_ratios_is_that_of_their_logs_and_scales_with_them(values, unit):
    found = paired_interval(by_seed(values))
    logs = mean_interval(by_seed(np.log(values)))
    scaled = paired_interval(by_seed(unit * np.asarray(values)))
    for name in ("low", "mean", "high"):
        end = getattr(logs, name)
        assert getattr(found, name) == pytest.approx(_exp(end), rel=1e-6)
        assert getattr(scaled, name) == pytest.approx(_exp(end + math.log(unit)), rel=1e-6)


def test_the_interval_of_inverse_ratios_is_the_inverse():
    values = np.exp(np.random.default_rng(2).normal(size=7))
    found, inverse = paired_interval(by_seed(values)), paired_interval(by_seed(1 / values))
    assert inverse.low == pytest.approx(1 / found.high, rel=1e-9)
    assert inverse.high == pytest.approx(1 / found.low, rel=1e-9)


@modest
@given(several(EITHER_SIGN, smallest=8))
def test_a_higher_level_never_gives_a_narrower_interval(values):
    narrow, wide = (mean_interval(by_seed(values), level) for level in (0.8, 0.99))
    assert wide.low <= narrow.low <= narrow.high <= wide.high


def _t_interval(values, level=0.9):
    half = t.ppf(0.5 + level / 2, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values))
    return np.mean(values) - half, np.mean(values) + half


@pytest.mark.parametrize("n", [3, 7])
def test_below_8_seeds_the_interval_is_student_s(n):
    values = np.random.default_rng(5).normal(size=n)
    found = mean_interval(by_seed(values))
    assert (found.low, found.high) == pytest.approx(_t_interval(values), rel=1e-12)


def test_from_8_seeds_on_skewness_widens_the_end_where_the_truth_may_be():
    """Right-skewed values have their mean below the truth more often: the upper end moves up."""
    skewed = skewnorm.ppf((np.arange(12) + 0.5) / 12, 8)
    found, (low, high) = mean_interval(by_seed(skewed)), _t_interval(skewed)
    assert found.low == pytest.approx(low, rel=1e-12)
    assert found.high - found.mean > 1.15 * (high - found.mean)
    mirrored = mean_interval(by_seed(-skewed))
    assert mirrored.high == pytest.approx(-low, rel=1e-12)
    even = np.random.default_rng(5).normal(size=20)
    found, (low, high) = mean_interval(by_seed(even)), _t_interval(even)
    assert found.low <= low
    assert found.high >= high
    assert found.high - found.low < 1.2 * (high - low)


@pytest.mark.parametrize("n", [3, 5, 8, 20])
def test_p_values_and_intervals_say_the_same(n):
    """An interval at 1 - 2 alpha ends where a one-sided p-value is alpha, of both sides."""
    rng = np.random.default_rng(n)
    for _ in range(5):
        values = by_seed(rng.exponential(size=n))
        found = mean_interval(values, 0.9)
        inward = 1e-3 * (found.high - found.low)
        assert p_values(values, found.low - inward)[0] < 0.0502 < p_values(values, found.mean)[0]
        assert p_values(values, found.low + inward)[0] > 0.0498
        assert p_values(values, found.high + inward)[1] < 0.0502
        assert p_values(values, found.high - inward)[1] > 0.0498


def test_p_values_of_what_leaves_no_doubt_and_of_what_says_nothing():
    assert p_values(by_seed([2.0] * 3), 1.0) == (0.0, 1.0)
    assert p_values(by_seed([2.0] * 3), 2.0) == (1.0, 1.0)
    assert p_values(by_seed([2.0, 3.0]), 1.0) == (1.0, 1.0)
    assert p_values(by_seed([2.0, math.nan, 3.0]), 1.0) == (1.0, 1.0)


def test_a_seed_that_is_zero_makes_the_geometric_mean_zero_and_bounds_nothing():
    found = paired_interval(by_seed([0.0, 1.0, 1.0, 1.0, 2.0]))
    assert (found.low, found.mean, found.high) == (0.0, 0.0, math.inf)


def test_ratios_below_zero_are_refused():
    with pytest.raises(ValueError, match=r"paired_interval: values must not be neg.* got -1\.0"):
        paired_interval(by_seed([2.0, -1.0]))


@pytest.mark.parametrize("level", [0, 1, 90, -0.1, math.nan])
def test_a_level_that_is_no_probability_is_refused(level):
    for call in (
        lambda: mean_interval({0: 1.0}, level),
        lambda: paired_interval({0: 1.0}, level),
    ):
        with pytest.raises(ValueError, match=r"level must be between 0 and 1"):
            call()


@pytest.mark.parametrize("count", [3, 5, 8])
@pytest.mark.parametrize("scale", [1e-300, 1e-170, 1e150])
def test_p_values_of_tiny_and_of_huge_values_are_those_of_ordinary_ones(count, scale):
    values = {seed: 1 + 0.1 * seed**1.5 for seed in range(count)}
    for bound in (0.9, 1.4):
        scaled = p_values({seed: value * scale for seed, value in values.items()}, bound * scale)
        assert scaled == pytest.approx(p_values(values, bound), rel=1e-6)
