"""A statement holds only if the whole interval lies where it says, and never without a number."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.kit.stated_tests import equal, every, mean_within, monotone, ratio_within
from stability.analysis.intervals import mean_interval, paired_interval

SEEDS = range(5)
ONES = dict.fromkeys(SEEDS, 1.0)
SPREAD = {0: 0.9, 1: 1.0, 2: 1.1, 3: 1.05, 4: 1.02}
"""Its interval holds 1."""
figures = st.lists(st.floats(1e-30, 1e30), min_size=5, max_size=9)
"""Of five seeds or more: enough for an interval."""


def _times(factor: float, values: dict[int, float] = SPREAD) -> dict[int, float]:
    return {seed: factor * value for seed, value in values.items()}


@settings(max_examples=30, deadline=None)
@given(figures)
def test_equal_figures_are_never_above_or_below_each_other(values):
    same = dict(enumerate(values))
    assert not ratio_within("", same, same, above=1).holds
    assert not ratio_within("", same, same, below=1).holds
    assert ratio_within("", same, same, above=0.999, below=1.001).holds
    assert not monotone("", {"a": same, "b": same}, rising=True).holds
    assert not monotone("", {"a": same, "b": same}, rising=False).holds


@settings(max_examples=30, deadline=None)
@given(figures)
def test_one_number_below_is_that_number_at_every_seed(values):
    over = dict(enumerate(values))
    assert ratio_within("", over, 2.0, above=1) == ratio_within(
        "", over, dict.fromkeys(over, 2.0), above=1
    )


@settings(max_examples=30, deadline=None)
@given(figures, figures)
def test_above_and_below_one_exclude_each_other(first, second):
    n = min(len(first), len(second))
    sides = dict(enumerate(first[:n])), dict(enumerate(second[:n]))
    above, below = ratio_within("", *sides, above=1), ratio_within("", *sides, below=1)
    assert not (above.holds and below.holds)
    swapped = ratio_within("", *sides[::-1], above=1)
    assert swapped.holds == below.holds or math.isclose(
        paired_interval({s: sides[0][s] / sides[1][s] for s in range(n)}).high, 1, rel_tol=1e-9
    )


@pytest.mark.parametrize(
    ("limits", "holds"),
    [
        ({"above": 1.5}, True),
        ({"above": 1.5, "below": 2.5}, True),
        ({"above": 2}, False),
        ({"below": 2}, False),
        ({"above": 1.95}, False),
        ({"below": 2.05}, False),
        ({"above": 3}, False),
        ({"below": 1}, False),
    ],
    ids=str,
)
def test_the_whole_interval_must_lie_inside(limits, holds):
    around_two = paired_interval(_times(2))
    assert 1.8 < around_two.low < 1.95 < 2 < 2.05 < around_two.high < 2.2
    assert ratio_within("twice", _times(2), ONES, **limits).holds is holds
    assert mean_within("two", _times(2), unit="ULP", **limits).holds is holds


def test_a_limit_that_the_interval_touches_is_not_kept():
    twice = dict.fromkeys(SEEDS, 2.0)
    assert not ratio_within("", twice, ONES, above=2).holds
    assert not ratio_within("", twice, ONES, below=2).holds
    assert not mean_within("", twice, unit="", above=2).holds


def test_ratios_are_paired_by_seed_in_whatever_order_the_seeds_come():
    wide = {seed: 10.0**seed for seed in SEEDS}
    reversed_order = {seed: 1.01 * wide[seed] for seed in reversed(SEEDS)}
    assert ratio_within("", reversed_order, wide, above=1.005, below=1.015).holds


def test_found_tells_estimate_interval_unit_and_seeds():
    found = mean_within("", _times(1, {s: float(s) for s in SEEDS}), unit="ULP").found
    interval = mean_interval({s: float(s) for s in SEEDS})
    ends = f"{interval.low:.3g} ULP to {interval.high:.3g} ULP"
    assert found == f"2 ULP (90 % interval {ends}; 5 seeds)"
    assert ratio_within("", ONES, ONES).found == "1x (90 % interval 1x to 1x; 5 seeds)"
    assert mean_within("", ONES, unit="").found == "1 (90 % interval 1 to 1; 5 seeds)"


@pytest.mark.parametrize("spoilt", [math.nan, math.inf])
def test_without_a_number_nothing_holds(spoilt):
    one_bad = {**ONES, 3: spoilt}
    for test in (
        ratio_within("", one_bad, ONES),
        mean_within("", one_bad, unit="ULP"),
        monotone("", {"a": ONES, "b": _times(2), "c": one_bad}, rising=True),
    ):
        assert not test.holds
        assert "no number, over 5 seeds" in test.found


def test_monotone_names_its_weakest_step():
    points = {"a": ONES, "b": _times(3), "c": _times(4), "d": _times(40)}
    rising = monotone("rises", points, rising=True)
    assert rising.holds
    assert rising.found.startswith("3 of 3 steps; weakest, b to c: 1.33x (")
    backwards = dict(reversed(points.items()))
    falling = monotone("falls", backwards, rising=False)
    assert falling.holds
    assert falling.found.startswith("3 of 3 steps; weakest, c to b: 0.75x (")
    assert monotone("rises", backwards, rising=True).found.startswith("0 of 3 steps; weakest, d ")


def test_monotone_with_one_flat_step_does_not_hold_and_names_it():
    points = {"a": ONES, "b": _times(3), "c": _times(3), "d": _times(40)}
    found = monotone("rises", points, rising=True)
    assert not found.holds
    assert found.found.startswith("2 of 3 steps; weakest, b to c: 1x (")


def test_a_fall_to_exactly_zero_is_a_fall():
    zero = dict.fromkeys(SEEDS, 0.0)
    assert monotone("", {"a": ONES, "b": zero}, rising=False).holds
    assert not monotone("", {"a": ONES, "b": zero}, rising=True).holds


@pytest.mark.parametrize(
    ("differences", "holds", "found"),
    [
        ([0.0, -0.0, 0.0], True, "0 in all 3"),
        ([0.0, -2.5, 1.0], False, "2 of 3: up to 2.5"),
        ([0.0, 5e-324], False, "1 of 2: up to 4.9e-324"),
        ([0.0, math.nan, 1.0], False, "2 of 3: a NaN"),
    ],
)
def test_equal_is_exactly_equal(differences, holds, found):
    test = equal("same", iter(differences))
    assert (test.holds, test.found) == (holds, found)


def test_the_statement_is_handed_on_and_nothing_is_a_control_by_itself():
    for test in (
        ratio_within("said", ONES, ONES),
        mean_within("said", ONES, unit=""),
        monotone("said", {"a": ONES, "b": ONES}, rising=True),
    ):
        assert (test.statement, test.control) == ("said", False)
    assert not equal("said", [0.0]).control


FEW = {0: 1.0, 1: 1.0}


@pytest.mark.parametrize(
    ("decide", "said"),
    [
        (lambda: ratio_within("", ONES, {0: 1.0}), r"ratio_within: seeds must be the same"),
        (lambda: ratio_within("", ONES, {**ONES, 2: 0.0}), r"must not be 0, is 0 at seed 2"),
        (lambda: ratio_within("", _times(-1), _times(-1)), r"figures must not be negative"),
        (lambda: ratio_within("", FEW, FEW), r"enough for an interval, got 2; 3 are"),
        (lambda: mean_within("", FEW, unit=""), r"enough for an interval, got 2"),
        (lambda: mean_within("", ONES, unit="", level=1.0), r"level must be between 0 and 1"),
        (lambda: monotone("", {"a": ONES}, rising=True), r"at least two points, got 1"),
        (
            lambda: monotone("", {"a": FEW, "b": FEW}, rising=True),
            r"monotone: seeds must be enough",
        ),
        (lambda: monotone("", {"a": ONES, "b": FEW}, rising=True), r"monotone: seeds must be the"),
        (lambda: equal("", []), r"equal: differences must not be empty"),
    ],
)
def test_what_decides_nothing_is_an_error(decide, said):
    with pytest.raises(ValueError, match=said):
        decide()


def test_every_value_must_lie_inside():
    assert every("s", [0.5, 0.9], above=0, below=1).holds
    over = every("s", [0.5, 1.0], unit="x", below=1)
    assert (over.holds, over.found) == (False, "0.5 to 1 x in all 2")
    assert not every("s", [math.nan, 0.5], below=1).holds
    with pytest.raises(ValueError, match="every: values must not be empty"):
        every("s", [])
