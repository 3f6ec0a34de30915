"""The excess and its interval: Student's on logs, right at the edges, as often wrong as said."""

import math

import numpy as np
import pytest
from scipy import stats

from stability.analysis.excess import excess_at, excess_over_seeds, log_excess_of, seeds_that_decide
from tests.stability.analysis.distance_studies import matrix

ALPHA = 0.014


def _points(**shifts):
    axis = np.eye(3)[0]
    return matrix({name: shift * axis for name, shift in shifts.items()})


def test_excess_is_the_ratio_of_the_distances_to_the_reference():
    found = _points(baseline=2.0, reference=0.0, candidate=-3.0)
    assert excess_at(found, "candidate", "reference") == 1.5
    assert excess_at(found, "baseline", "reference") == 1.0
    assert log_excess_of(found, "candidate", "reference") == math.log(1.5)
    assert log_excess_of(found, "reference", "reference") == -math.inf


def test_without_an_arm_there_is_none_and_without_an_error_it_is_no_number():
    found = _points(baseline=2.0, reference=2.0, candidate=1.0)
    assert excess_at(found, "missing", "reference") is None
    assert excess_at(found, "candidate", "missing") is None
    assert math.isnan(excess_at(found, "candidate", "reference"))
    assert math.isnan(log_excess_of(found, "candidate", "reference"))


def test_bounds_and_p_values_are_those_of_students_t_on_logs():
    values = dict(enumerate((1.02, 1.05, 0.99, 1.01, 1.08)))
    logs = np.log(list(values.values()))
    found = excess_over_seeds(values, 1.10, ALPHA)
    assert found.mean == pytest.approx(math.exp(logs.mean()))
    low, high = stats.t.interval(
        1 - 2 * ALPHA, 4, loc=logs.mean(), scale=logs.std(ddof=1) / math.sqrt(5)
    )
    assert (math.log(found.low), math.log(found.high)) == pytest.approx((low, high))
    for side, p in (("less", found.p_holds), ("greater", found.p_harmed)):
        test = stats.ttest_1samp(logs, math.log(1.10), alternative=side)
        assert p == pytest.approx(test.pvalue)
    assert found.p_holds + found.p_harmed == pytest.approx(1.0)


def test_a_bound_beyond_the_limit_is_the_same_as_a_small_p():
    dice = np.random.default_rng(0)
    for _ in range(200):
        found = excess_over_seeds(dict(enumerate(np.exp(dice.normal(0.09, 0.02, 5)))), 1.1, ALPHA)
        assert (found.high < 1.1) == (found.p_holds < ALPHA)
        assert (found.low > 1.1) == (found.p_harmed < ALPHA)


def test_equal_seeds_are_sure():
    for value, sure in ((1.0, "p_holds"), (1.3, "p_harmed")):
        found = excess_over_seeds(dict.fromkeys(range(5), value), 1.1, ALPHA)
        assert (found.low, found.mean, found.high) == (value, value, value)
        assert getattr(found, sure) == 0.0
    at = excess_over_seeds(dict.fromkeys(range(5), 1.1), 1.1, ALPHA)
    assert at.p_holds == at.p_harmed == 1.0


@pytest.mark.parametrize("count", [1, 2])
def test_fewer_than_three_seeds_have_a_value_and_no_bounds(count):
    found = excess_over_seeds({seed: 2.0 + seed for seed in range(count)}, 1.1, ALPHA)
    assert found.mean == pytest.approx(math.sqrt(6) if count == 2 else 2.0)
    assert math.isnan(found.low)
    assert math.isnan(found.p_harmed)


def test_from_eight_seeds_on_skew_widens_the_bounds():
    skewed = dict(enumerate(np.exp(np.random.default_rng(5).exponential(0.1, 8))))
    logs = np.log(list(skewed.values()))
    found = excess_over_seeds(skewed, 1.1, ALPHA)
    low, high = stats.t.interval(1 - 2 * ALPHA, 7, logs.mean(), logs.std(ddof=1) / math.sqrt(8))
    assert math.log(found.low) <= low + 1e-12
    assert math.log(found.high) > high


@pytest.mark.parametrize("values", [{}, {0: 0.0}, {0: math.nan}, {0: math.inf, 1: 1.0}])
def test_what_has_no_log_is_refused(values):
    with pytest.raises(ValueError, match="values must be positive numbers, one at least"):
        excess_over_seeds(values, 1.1, ALPHA)


def test_a_candidate_at_the_limit_passes_and_fails_as_often_as_the_look_allows():
    """2,000 studies of 5 seeds at E = 1.10: 28 a side expected, 44 is three standard deviations."""
    dice = np.random.default_rng(1)
    found = [
        excess_over_seeds(dict(enumerate(row)), 1.1, ALPHA)
        for row in np.exp(dice.normal(math.log(1.1), 0.03, (2000, 5)))
    ]
    assert 12 <= sum(one.high < 1.1 for one in found) <= 44
    assert 12 <= sum(one.low > 1.1 for one in found) <= 44


def test_so_many_seeds_decide_as_it_says():
    values = dict(enumerate((1.0, 1.2, 1.05, 1.12)))
    count = seeds_that_decide(values, 1.1, ALPHA)
    assert count is not None
    logs = np.log(list(values.values()))
    reach = [
        stats.t.isf(ALPHA, n - 1) * logs.std(ddof=1) / math.sqrt(n) for n in (count - 1, count)
    ]
    distance = abs(logs.mean() - math.log(1.1))
    assert reach[1] < distance <= reach[0]
    assert seeds_that_decide({0: 1.0}, 1.1, ALPHA) is None
    assert seeds_that_decide(dict(enumerate((1.0, 1.1 * 1.1))), 1.1, ALPHA) is None
