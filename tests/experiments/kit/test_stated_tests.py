"""A statement holds if the whole interval lies where it says, and is refuted if all is elsewhere.

Whatever else the seeds leave is undecided, and so is everything without a number.
"""

import math
import re
from statistics import stdev

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from experiments.kit.stated_tests import (
    StatedTest,
    equal,
    every,
    mean_within,
    monotone,
    ratio_within,
    scatter_within,
)
from stability.analysis.intervals import mean_interval, paired_interval

SEEDS = range(5)
ONES = dict.fromkeys(SEEDS, 1.0)
SPREAD = {0: 0.9, 1: 1.0, 2: 1.1, 3: 1.05, 4: 1.02}
"""Its interval holds 1."""
figures = st.lists(st.floats(1e-30, 1e30), min_size=5, max_size=9)
"""Of five seeds or more: enough for an interval."""


def _times(factor: float, values: dict[int, float] = SPREAD) -> dict[int, float]:
    return {seed: factor * value for seed, value in values.items()}


@settings(max_examples=30)
@given(figures)
def test_equal_figures_are_never_above_or_below_each_other(values):
    same = dict(enumerate(values))
    assert not ratio_within("", same, same, above=1).holds
    assert not ratio_within("", same, same, below=1).holds
    assert ratio_within("", same, same, above=0.999, below=1.001).holds
    assert not monotone("", {"a": same, "b": same}, rising=True).holds
    assert not monotone("", {"a": same, "b": same}, rising=False).holds


@settings(max_examples=30)
@given(figures)
def test_one_number_below_is_that_number_at_every_seed(values):
    over = dict(enumerate(values))
    assert ratio_within("", over, 2.0, above=1) == ratio_within(
        "", over, dict.fromkeys(over, 2.0), above=1
    )


@settings(max_examples=30)
@given(figures, figures)
@example([1.0, 1.0, 1.0, 1.0, 1.0000000000000003], [1.0] * 5)  # an interval that begins in 1
def test_above_and_below_one_exclude_each_other(first, second):
    n = min(len(first), len(second))
    sides = dict(enumerate(first[:n])), dict(enumerate(second[:n]))
    above, below = ratio_within("", *sides, above=1), ratio_within("", *sides, below=1)
    assert not (above.holds and below.holds)
    # an interval may end in 1, which neither "above" nor "below" has
    between = paired_interval({s: sides[0][s] / sides[1][s] for s in range(n)})
    assert above.holds <= (below.decision == "refuted")
    assert below.holds <= (above.decision == "refuted")
    open_below = below.decision == "undecided" or below.holds
    assert (above.decision == "undecided") <= (open_below or between.low == 1)
    swapped = ratio_within("", *sides[::-1], above=1)
    assert swapped.holds == below.holds or math.isclose(between.high, 1, rel_tol=1e-9)


@pytest.mark.parametrize(
    ("limits", "decision"),
    [
        ({"above": 1.5}, "holds"),
        ({"above": 1.5, "below": 2.5}, "holds"),
        ({"above": 2}, "undecided"),
        ({"below": 2}, "undecided"),
        ({"above": 1.95}, "undecided"),
        ({"below": 2.05}, "undecided"),
        ({"above": 1.99, "below": 2.01}, "undecided"),
        ({"above": 3}, "refuted"),
        ({"below": 1}, "refuted"),
        ({"above": 3, "below": 4}, "refuted"),
        ({"above": 0.5, "below": 1}, "refuted"),
    ],
    ids=str,
)
def test_the_whole_interval_must_lie_inside_to_hold_and_outside_to_refute(limits, decision):
    around_two = paired_interval(_times(2))
    assert 1.8 < around_two.low < 1.95 < 2 < 2.05 < around_two.high < 2.2
    for test in (
        ratio_within("twice", _times(2), ONES, **limits),
        mean_within("two", _times(2), unit="ULP", **limits),
    ):
        assert test.decision == decision
        assert test.holds == (decision == "holds")


def test_a_limit_that_the_interval_touches_is_not_kept():
    twice = dict.fromkeys(SEEDS, 2.0)
    # every seed is exactly 2, so that it is neither above nor below is no open question
    assert ratio_within("", twice, ONES, above=2).decision == "refuted"
    assert ratio_within("", twice, ONES, below=2).decision == "refuted"
    assert mean_within("", twice, unit="", above=2).decision == "refuted"


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
def test_without_a_number_nothing_is_decided(spoilt):
    one_bad = {**ONES, 3: spoilt}
    for test in (
        ratio_within("", one_bad, ONES),
        mean_within("", one_bad, unit="ULP"),
        monotone("", {"a": ONES, "b": _times(2), "c": one_bad}, rising=True),
        scatter_within("", one_bad, SPREAD),
    ):
        assert test.decision == "undecided"
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
    against = monotone("rises", backwards, rising=True)
    assert against.decision == "refuted"
    assert against.found.startswith("0 of 3 steps, 3 the other way; weakest, d ")


def test_monotone_with_one_flat_step_does_not_hold_and_names_it():
    points = {"a": ONES, "b": _times(3), "c": _times(3), "d": _times(40)}
    found = monotone("rises", points, rising=True)
    assert found.decision == "refuted"  # it is flat at every seed: there is no doubt
    assert found.found.startswith("2 of 3 steps, 1 the other way; weakest, b to c: 1x (")


def test_monotone_is_undecided_where_a_step_may_go_either_way_and_none_surely_goes_back():
    flat = {0: 3.1, 1: 2.9, 2: 3.0, 3: 3.05, 4: 2.95}
    points = {"a": ONES, "b": dict.fromkeys(SEEDS, 3.0), "c": flat, "d": _times(40)}
    for rising in (True, False):
        found = monotone("", points if rising else dict(reversed(points.items())), rising=rising)
        assert found.decision == "undecided"
        assert found.found.startswith("2 of 3 steps; weakest, ")


@pytest.mark.parametrize("open_step", [SPREAD, {**ONES, 2: math.nan}], ids=["straddles", "NaN"])
def test_one_step_back_refutes_monotone_whatever_else_is_undecided(open_step):
    points = {"a": ONES, "b": open_step, "c": _times(50), "d": _times(5), "e": _times(60)}
    found = monotone("", points, rising=True)
    assert found.decision == "refuted"
    assert "1 the other way; weakest, c to d: 0.1x (" in found.found
    # the planted step turned round: what is left decides nothing
    points["d"] = _times(55)
    assert monotone("", points, rising=True).decision == "undecided"


def test_a_fall_to_exactly_zero_is_a_fall():
    zero = dict.fromkeys(SEEDS, 0.0)
    assert monotone("", {"a": ONES, "b": zero}, rising=False).holds
    assert monotone("", {"a": ONES, "b": zero}, rising=True).decision == "refuted"
    assert ratio_within("", zero, ONES, below=1).decision == "holds"
    assert ratio_within("", zero, ONES, above=0).decision == "refuted"
    # of a law that has zeros and others nothing is known: its interval has no ends
    some = {**ONES, 3: 0.0}
    assert monotone("", {"a": ONES, "b": some}, rising=False).decision == "undecided"


@pytest.mark.parametrize(
    ("differences", "decision", "found"),
    [
        ([0.0, -0.0, 0.0], "holds", "0 in all 3"),
        ([0.0, -2.5, 1.0], "refuted", "2 of 3: up to 2.5"),
        ([0.0, 5e-324], "refuted", "1 of 2: up to 4.9e-324"),
        ([0.0, math.nan, 1.0], "refuted", "2 of 3: a NaN"),
        ([0.0, math.nan], "refuted", "1 of 2: a NaN"),
    ],
)
def test_equal_is_exactly_equal_and_one_counterexample_refutes(differences, decision, found):
    test = equal("same", iter(differences))
    assert (test.decision, test.found) == (decision, found)


def test_the_statement_is_handed_on_and_nothing_is_a_control_by_itself():
    for test in (
        ratio_within("said", ONES, ONES),
        mean_within("said", ONES, unit=""),
        monotone("said", {"a": ONES, "b": ONES}, rising=True),
    ):
        assert (test.statement, test.control) == ("said", False)
    assert not equal("said", [0.0]).control


FEW = {0: 1.0, 1: 1.0}
THREE = {0: 1.0, 1: 1.1, 2: 1.3}


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
        (
            lambda: scatter_within("", _times(1, THREE), THREE),
            r"scatter_within: seeds must be at least 4, so that 3 are left without any one, got 3",
        ),
        (lambda: scatter_within("", SPREAD, THREE), r"scatter_within: seeds must be the same"),
        (lambda: scatter_within("", {**ONES, 1: -1.0}, SPREAD), r"figures must not be negative"),
        (lambda: scatter_within("", {**ONES, 1: 0.0}, SPREAD), r"must be positive, got 0"),
        (lambda: scatter_within("", SPREAD, {**ONES, 1: 0.0}), r"must not be 0, is 0 at seed 1"),
        (lambda: scatter_within("", SPREAD, ONES), r"denominator must scatter over the seeds"),
        (
            lambda: scatter_within("", SPREAD, {**ONES, 3: 2.0}),
            r"is the same at all but seed 3; a ratio to nothing",
        ),
        (
            lambda: StatedTest(statement="", found="", decision="no"),  # pyright: ignore
            r"StatedTest: decision must be one of holds, refuted, undecided, got 'no'",
        ),
    ],
)
def test_what_decides_nothing_is_an_error(decide, said):
    with pytest.raises(ValueError, match=said):
        decide()


def test_every_value_must_lie_inside():
    assert every("s", [0.5, 0.9], above=0, below=1).holds
    over = every("s", [0.5, 1.0], unit="x", below=1)
    assert (over.decision, over.found) == ("refuted", "0.5 to 1 x in all 2")
    for values in ([math.nan, 0.5], [0.5, math.nan]):
        spoilt = every("s", values, below=1)
        assert (spoilt.decision, spoilt.found) == ("refuted", "0.5 to 0.5 in all 2, a NaN in 1")
    assert every("s", [math.nan]).found == "no number in all 1, a NaN in 1"
    with pytest.raises(ValueError, match="every: values must not be empty"):
        every("s", [])


NARROW = {0: 1.0, 1: 1.04, 2: 0.97, 3: 1.02, 4: 0.99}
WIDE = {0: 0.4, 1: 1.1, 2: 2.9, 3: 0.6, 4: 1.7}


def test_scatter_in_all_seeds_holds_and_the_other_way_round_is_refuted():
    wider = scatter_within("", WIDE, NARROW, above=1)
    assert (wider.decision, wider.holds) == ("holds", True)
    assert scatter_within("", NARROW, WIDE, above=1).decision == "refuted"
    assert scatter_within("", NARROW, WIDE, below=1).decision == "holds"
    # logs: neither the unit of a quantity nor its sign as an exponent is scatter
    assert scatter_within("", _times(1e-9, WIDE), NARROW, above=1).holds
    assert scatter_within("", {s: 1 / x for s, x in WIDE.items()}, NARROW, above=1).holds


@pytest.mark.parametrize("outlier", SEEDS)
def test_a_single_outlying_seed_decides_nothing_about_scatter(outlier):
    like = {0: 0.98, 1: 1.0, 2: 1.03, 3: 0.96, 4: 1.01}
    planted = {**like, outlier: 25.0}
    wider = scatter_within("", planted, NARROW, above=1)
    assert wider.decision == "undecided"
    # the interval of all seeds alone would have called it wider
    all_seeds, without = wider.found.split("; without seed ")
    assert float(all_seeds.partition("interval ")[2].split("x")[0]) > 1
    assert without.startswith(f"{outlier}: ")
    assert scatter_within("", NARROW, planted, above=1).decision == "undecided"


def test_a_scatter_that_one_seed_hides_is_undecided_too():
    # seed 2 of the wide one lies in its middle, and that of the narrow one far out
    hidden = scatter_within("", {**WIDE, 2: 0.9}, {**NARROW, 2: 8.0}, above=1)
    assert hidden.decision == "undecided"


def test_the_ends_are_where_the_correlation_is_just_significant():
    from scipy.stats import pearsonr

    found = scatter_within("", WIDE, NARROW, above=1).found
    ratio, low, high = (
        float(number) for number in re.findall(r"([\d.]+)x", found.partition(";")[0])
    )
    a, b = ([math.log(x) for x in values.values()] for values in (WIDE, NARROW))
    for end in (low, high):
        both = [x + end * y for x, y in zip(a, b, strict=True)]
        apart = [x - end * y for x, y in zip(a, b, strict=True)]
        _, p_value = pearsonr(both, apart)
        assert p_value == pytest.approx(0.1, rel=0.02)  # `found` has 3 digits
    assert low < ratio < high
    assert ratio == pytest.approx(stdev(a) / stdev(b), rel=0.01)


def test_equal_scatter_is_seldom_called_more_or_less():
    random = np.random.default_rng(5)
    laws = (random.standard_normal, lambda size: random.standard_t(3, size))
    for law in laws:
        decisions = [
            scatter_within("", *(dict(enumerate(np.exp(x))) for x in law((2, 5))), above=1).decision
            for _ in range(300)
        ]
        # 1.5 % a side were measured, 5 % is what is allowed: 15 of 300
        assert decisions.count("holds") <= 15
        assert decisions.count("refuted") <= 15


def test_a_perfect_correlation_leaves_no_doubt_of_the_ratio():
    squares = {seed: value**2 for seed, value in WIDE.items()}
    assert scatter_within("", squares, WIDE, above=1.99, below=2.01).holds
    assert scatter_within("", ONES, WIDE, below=1e-9).holds
