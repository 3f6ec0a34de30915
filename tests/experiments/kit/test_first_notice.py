"""A signal is noticed where it stays above what means nothing, in each look, over seeds."""

import math

from experiments.kit.rows import first_notice


def _ratios(*by_step):
    """Ratios of five seeds, about the value given for each step."""
    return {
        10 * index: {seed: value * (1 + 0.05 * seed) for seed in range(5)}
        for index, value in enumerate(by_step)
    }


def test_first_of_three_looks_in_a_row_is_named():
    assert first_notice(_ratios(0.9, 8, 8, 8, 0.9, 0.9)) == 10


def test_a_chance_look_does_not_count():
    assert first_notice(_ratios(8, 8, 0.9, 8, 8, 0.9)) is None
    assert first_notice(_ratios(8, 0.9, 8, 8, 8, 8)) == 20


def test_a_ratio_about_one_is_never_noticed_whatever_a_single_seed_says():
    assert first_notice(_ratios(*[0.92] * 6)) is None
    scattered = {step: {**by_seed, 0: 0.1} for step, by_seed in _ratios(*[1.5] * 6).items()}
    assert first_notice(scattered) is None


def test_without_a_ratio_a_look_does_not_tell():
    ratios = _ratios(*[8] * 6)
    ratios[20][3] = math.nan
    assert first_notice(ratios) == 30
