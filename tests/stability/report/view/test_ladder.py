"""Which arms have a place on the axis of a ladder's picture, and why others have none."""

from dataclasses import replace

import pytest

from stability.analysis.ladder import EarlyLast, ladder_of
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import read_study
from stability.report.view.error_bars import bar_ends, written_bar
from stability.report.view.ladder import OFF_SCALE, numbers, rungs, rungs_of_each


@pytest.fixture(scope="module")
def ladder(finished):
    return ladder_of(read_study(finished))


def with_drift(ladder, arm, early, last):
    """The ladder with other drifts of one arm: a number is that of both seeds, None is missing."""

    def both(value):
        return SeedValues({} if value is None else {0: value, 1: value})

    drift = EarlyLast(early=both(early), last=both(last))
    rows = tuple(replace(row, rel_l2=drift) if row.arm == arm else row for row in ladder.rows)
    return replace(ladder, rows=rows)


def reason(ladder, arm):
    return next(rung.off_axis for rung in rungs(ladder) if rung.row.arm == arm)


def test_every_arm_but_the_baseline_is_a_rung_in_the_ladders_order(ladder):
    assert [rung.row for rung in rungs(ladder)] == list(ladder.rows[1:])
    assert {rung.row.arm: rung.off_axis for rung in rungs(ladder) if rung.off_axis} == {
        "rerun": "zero",
        "init_seed": "beyond",
    }


def test_unpaired_arms_do_not_set_the_scale(ladder):
    highest = max(rung.row.rel_l2.last.high for rung in rungs(ladder) if not rung.off_axis)
    for arm, near, far in (("init_seed", "", "beyond"), ("nudge", "", "")):
        for drift, expected in ((OFF_SCALE * highest, near), (OFF_SCALE * highest * 1.01, far)):
            assert reason(with_drift(ladder, arm, drift, drift), arm) == expected


def test_what_a_log_axis_can_not_show_has_a_reason_and_no_mark(ladder):
    assert reason(with_drift(ladder, "nudge", None, None), "nudge") == "missing"
    assert reason(with_drift(ladder, "nudge", 1e-3, float("inf")), "nudge") == "beyond"
    half = with_drift(ladder, "nudge", 0.0, 1e-3)
    assert reason(half, "nudge") == "zero"
    (rung,) = (rung for rung in rungs(half) if rung.row.arm == "nudge")
    assert [(mark.values.mean, mark.is_early) for mark in rung.marks] == [(1e-3, False)]
    assert rung.means == [0.0, 1e-3]


def test_several_ladders_share_one_scale(ladder):
    far = with_drift(ladder, "fp32", 1e3, 1e3)
    assert reason(ladder, "init_seed") == "beyond"
    both = rungs_of_each([ladder, far], lambda row: row.rel_l2)
    assert [len(each) for each in both] == [6, 6]
    assert {rung.off_axis for each in both for rung in each if rung.row.arm == "init_seed"} == {""}


def test_the_baseline_has_a_loss_and_no_other_number(ladder):
    found = numbers(ladder.rows[0])
    assert [name for name, number in found.items() if number.values.n] == ["final_loss"]
    empty = [name for name, number in numbers(ladder.row("fp32")).items() if not number.values.n]
    assert empty == ["held_out_loss"], "nothing is held out in this study"


def test_an_error_bar_holds_its_mean(ladder):
    for row in ladder.rows[1:]:
        for values, write in numbers(row).values():
            if not values.n:
                continue
            low, high = bar_ends(values)
            assert low <= values.mean <= high
            assert (written_bar(values, write) == "") == (write(low) == write(high))
