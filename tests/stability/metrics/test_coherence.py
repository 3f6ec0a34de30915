"""Coherence and share of known errors, and how often the interval of the share misses."""

import math

import numpy as np
import pytest
from scipy.stats import t

from stability.metrics.coherence import coherence_of


def _errors(looks, size, share, rng, spectrum=None, spread=0.0):
    """Draw errors of mean square 1 whose common part has `share` of it."""
    variances = np.ones(size) if spectrum is None else spectrum
    variances = variances / variances.sum()
    common = np.sqrt(share * variances)
    noise = rng.standard_normal((looks, size)) * np.sqrt((1 - share) * variances)
    return (common + noise) * np.exp(spread * rng.standard_normal((looks, 1)))


def _of(errors):
    return coherence_of(errors @ errors.T)


def test_one_error_seen_n_times_has_coherence_n_and_share_1():
    found = _of(np.tile(np.arange(1.0, 6.0), (7, 1)))
    assert found.looks == 7
    assert found.coherence == pytest.approx(7, rel=1e-12)
    assert found.share == pytest.approx(1, rel=1e-12)
    assert found.share_se == pytest.approx(0, abs=1e-7)


def test_orthogonal_errors_have_coherence_1_and_share_0():
    found = _of(np.eye(6))
    assert (found.coherence, found.share) == (1.0, 0.0)


def test_errors_that_cancel_have_a_coherence_below_1():
    found = _of(np.array([[1.0, 2.0], [-1.0, -2.0]]))
    assert (found.coherence, found.share) == (0.0, -1.0)
    assert math.isnan(found.share_se)


def test_the_formulas_are_those_of_the_vectors():
    errors = _errors(9, 50, 0.1, np.random.default_rng(0))
    found = _of(errors)
    by_hand = np.square(errors.sum(axis=0)).sum() / np.square(errors).sum()
    assert found.coherence == pytest.approx(by_hand, rel=1e-12)
    assert found.share == pytest.approx((by_hand - 1) / 8, rel=1e-12)


def test_errors_that_are_all_zero_share_nothing_for_sure():
    found = coherence_of(np.zeros((5, 5)))
    assert (found.looks, found.coherence, found.share, found.share_se) == (5, 1.0, 0.0, 0.0)


def test_one_look_among_silent_ones_is_no_division_by_zero():
    gram = np.zeros((4, 4))
    gram[0, 0] = 2.0
    found = coherence_of(gram)
    assert (found.coherence, found.share) == (1.0, 0.0)
    assert math.isfinite(found.share_se)


@pytest.mark.parametrize("looks", [0, 1, 2])
def test_too_few_looks_give_no_number(looks):
    found = coherence_of(np.eye(looks))
    assert found.looks == looks
    assert math.isnan(found.share_se)
    assert math.isnan(found.share) == (looks < 2)
    assert math.isnan(found.coherence) == (looks < 1)


def test_share_does_not_depend_on_the_number_of_looks_and_coherence_does():
    rng = np.random.default_rng(1)
    few, many = (_of(_errors(looks, 2000, 0.2, rng)) for looks in (20, 80))
    assert abs(few.share - 0.2) < 4 * few.share_se
    assert abs(many.share - 0.2) < 4 * many.share_se
    assert many.coherence > 3 * few.coherence


def _misses(looks, share, repetitions, nominal, *, spectrum=None, size=300):
    """Return how often the one-sided bounds of the share exclude the truth: (above it, below)."""
    rng = np.random.default_rng(2)
    quantile = t.ppf(1 - nominal, looks - 1)
    above = below = 0
    for _ in range(repetitions):
        found = _of(_errors(looks, size, share, rng, spectrum))
        above += found.share - quantile * found.share_se > share
        below += found.share + quantile * found.share_se < share
    return above / repetitions, below / repetitions


def test_the_bounds_miss_about_as_often_as_they_say():
    for share in (0.0, 0.01):
        above, below = _misses(20, share, 600, 0.05)
        # 5 %, plus three Monte Carlo errors of 0.9 %
        assert above < 0.077
        assert below < 0.077
        assert above + below > 0.01  # and not because they are endlessly wide


@pytest.mark.long
@pytest.mark.parametrize("looks", [20, 40])
@pytest.mark.parametrize("share", [0.0, 0.01])
@pytest.mark.parametrize("law", ["flat", "1/k"])
def test_the_bounds_miss_as_often_as_they_say_up_to_the_usual_limit(looks, share, law):
    spectrum = None if law == "flat" else 1 / np.arange(1, 301)
    for nominal in (0.05, 0.014):
        rates = _misses(looks, share, 5000, nominal, spectrum=spectrum)
        assert max(rates) < 1.5 * nominal + 3 * math.sqrt(nominal / 5000), (nominal, rates)


@pytest.mark.long
@pytest.mark.parametrize("looks", [20, 40])
def test_a_share_well_above_the_limit_is_not_taken_for_one_below_it(looks):
    # the worst law: the common error lies along the few directions in which noise is largest, and
    # the upper bound misses a share of 0.05 itself in 10 to 15 % at a nominal 5 %
    rng, spectrum = np.random.default_rng(4), 1 / np.arange(1, 301)
    quantile = t.ppf(0.95, looks - 1)
    wrong = 0
    for _ in range(5000):
        found = _of(_errors(looks, 300, 0.05, rng, spectrum))
        wrong += found.share + quantile * found.share_se < 0.01
    assert wrong / 5000 < 0.05
