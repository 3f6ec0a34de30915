"""A signal is noticed where its gap stays above a meaningless one, in every look, over seeds."""

import pytest

from stability.analysis.first_notice import first_notice

SEEDS = range(5)


def _gaps(*by_step):
    """Gaps of each of the five seeds, about the value given for each step."""
    return {
        10 * index: {seed: value * (1 + 0.05 * seed) for seed in SEEDS}
        for index, value in enumerate(by_step)
    }


NOTHING = _gaps(*[1.1] * 6)


def test_first_of_three_looks_in_a_row_is_named():
    assert first_notice(_gaps(1, 9, 9, 9, 1, 1), NOTHING) == 10


def test_a_chance_look_does_not_count():
    assert first_notice(_gaps(9, 9, 1, 9, 9, 1), NOTHING) is None
    assert first_notice(_gaps(9, 1, 9, 9, 9, 9), NOTHING) == 20


def test_a_gap_as_large_as_that_of_nothing_is_never_noticed():
    gaps = {step: {**by_seed, 0: 0.1, 1: 5.0} for step, by_seed in NOTHING.items()}
    assert first_notice(gaps, NOTHING) is None


def test_a_gap_of_zero_on_the_other_side_decides_nothing():
    assert first_notice(_gaps(*[9] * 6), {**NOTHING, 20: dict.fromkeys(SEEDS, 0.0)}) == 30


def test_other_seeds_are_refused():
    with pytest.raises(ValueError, match="the same steps and seeds"):
        first_notice(NOTHING, {step: {7: 1.0} for step in NOTHING})
