"""Rows of an experiment are chosen by value, and picked from by seed."""

import pytest

from stability.analysis.experiment_rows import by_seed, chosen

ROWS = [
    {"format": format, "seed": seed, "error": seed + shift}
    for format, shift in (("fp16", 1.0), ("bf16", 8.0), ("bf16", 4.0))
    for seed in (3, 5)
]


def test_by_seed_picks_the_largest_unless_told():
    assert by_seed(ROWS, "error", format="bf16") == {3: 11.0, 5: 13.0}
    assert by_seed(ROWS, "error", min) == {3: 4.0, 5: 6.0}


def test_a_choice_of_nothing_is_refused():
    assert len(chosen(ROWS, format="fp16")) == 2
    with pytest.raises(ValueError, match=r"chosen: only must be values .* got {'format': 'fp8'}"):
        chosen(ROWS, format="fp8")
