"""What a stated test is decided from: one figure a seed, taken from an experiment's rows."""

import pytest

from stability.analysis.stated_tests import by_seed

ROWS = [
    {"seed": seed, "length": length, "error": seed + length}
    for seed in (0, 1)
    for length in (10, 20)
]


def test_figures_are_those_of_the_rows_that_were_asked_for():
    assert by_seed(ROWS, "error", length=20) == {0: 20.0, 1: 21.0}


def test_rows_that_nothing_tells_apart_are_refused():
    with pytest.raises(ValueError, match="got two of seed 0 for 'error'"):
        by_seed(ROWS, "error")
