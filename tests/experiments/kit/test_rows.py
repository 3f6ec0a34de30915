"""Rows of an experiment are chosen by value, and picked from by seed."""

import pytest

from experiments.kit.rows import by_seed, chosen

ROWS = [
    {"format": format, "seed": seed, "error": seed + shift}
    for format, shift in (("fp16", 1.0), ("bf16", 8.0), ("bf16", 4.0))
    for seed in (3, 5)
]


def test_by_seed_picks_among_several():
    assert by_seed(ROWS, "error", max, format="bf16") == {3: 11.0, 5: 13.0}
    assert by_seed(ROWS, "error", min) == {3: 4.0, 5: 6.0}


def test_rows_that_nothing_tells_apart_are_refused():
    assert by_seed(ROWS, "error", format="fp16") == {3: 4.0, 5: 6.0}
    with pytest.raises(ValueError, match=r"got 2 of seed 3 for 'error' with {'format': 'bf16'}"):
        by_seed(ROWS, "error", format="bf16")


def test_a_choice_of_nothing_is_refused():
    assert len(chosen(ROWS, format="fp16")) == 2
    with pytest.raises(ValueError, match=r"chosen: only must be values .* got {'format': 'fp8'}"):
        chosen(ROWS, format="fp8")
