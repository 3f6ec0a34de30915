"""The time left of a whole study, by a clock that the test sets."""

from functools import partial

import pytest

from stability.report.terminal.time_left import TimeLeft as _TimeLeft

RUNS = [(arm, seed) for seed in (0, 1) for arm in ("baseline", "fa2")]

REPORT_S = 3.0
TimeLeft = partial(_TimeLeft, report=REPORT_S)


def study(planted=(("fa2", 0),), steps=10, weight=40.0):
    """Return two arms in two seeds, of so many steps, and faults as long as `weight` updates."""
    return TimeLeft(len(RUNS), dict.fromkeys(RUNS, steps), dict.fromkeys(planted, weight))


def train(left, run, begin, seconds, steps=10):
    """Make a whole run, and return when it is over."""
    left.run_started(run, steps, begin)
    left.under_way[run].reach(0, begin)
    left.under_way[run].reach(steps, begin + seconds)
    left.run_ended(run, begin + seconds)
    return begin + seconds


def test_what_follows_the_last_run_takes_as_long_as_after_an_earlier_seed():
    """Where all is kept, distances are measured once a seed, and no other pause is as long."""
    left = study(planted=())
    now = train(left, RUNS[0], 0.0, 10.0)
    now = train(left, RUNS[1], now + 1.0, 10.0)
    assert left.of_study(now).seconds == pytest.approx(21 + 1 + REPORT_S), "none has ended before"
    now = train(left, RUNS[2], now + 30.0, 10.0)
    now = train(left, RUNS[3], now + 1.0, 10.0)
    assert left.of_study(now).seconds == 30 + REPORT_S


def test_a_run_that_is_looked_at_is_not_projected_onto_those_to_come():
    """Looks of the first seed alone make its run ten times as long; the others are as the first."""
    left = study(planted=())
    now = train(left, RUNS[0], 0.0, 20.0)
    left.run_started(RUNS[1], 10, now)
    left.under_way[RUNS[1]].reach(0, now)
    left.under_way[RUNS[1]].reach(5, now + 50.0)
    assert left.of_study(now + 50.0).seconds == 50 + 2 * 20 + REPORT_S
    left.under_way[RUNS[1]].reach(10, now + 100.0)
    left.run_ended(RUNS[1], now + 100.0)
    now = train(left, RUNS[2], now + 100.0, 12.0)
    assert left.of_study(now).seconds == pytest.approx(12 + REPORT_S), (
        "as the seed's, not the arm's"
    )


def test_an_arm_goes_on_as_in_another_seed_but_the_first():
    runs = [(arm, seed) for seed in (0, 1, 2) for arm in ("baseline", "slow")]
    left = TimeLeft(len(runs), dict.fromkeys(runs, 10))
    now = 0.0
    for run, seconds in zip(runs[:5], (10.0, 99.0, 10.0, 30.0, 10.0), strict=True):
        now = train(left, run, now, seconds)
    assert left.of_study(now).seconds == pytest.approx(30 + REPORT_S)


def test_runs_that_train_at_once_are_counted_at_once():
    left = study(planted=())
    for run in RUNS[:2]:
        left.run_started(run, 10, 0.0)
        left.under_way[run].reach(0, 0.0)
        left.under_way[run].reach(10, 20.0)
    for run in RUNS[:2]:
        left.run_ended(run, 20.0)
    assert left.of_study(20.0).seconds == 2 * 20 / 2 + REPORT_S


def test_faults_are_counted_by_the_pace_of_all_runs_and_then_by_that_of_their_own():
    left = study()
    assert left.of_study(5.0).seconds is None, "before a run has begun nothing is known"
    now = train(left, ("baseline", 0), 100.0, 10.0)
    # three more runs of 10 s, and 40 updates of 1 s
    assert left.of_study(now).seconds == 3 * 10 + 40 + REPORT_S
    now = train(left, ("fa2", 0), now, 30.0)
    # 20 s a run now; 3 s an update of that run
    assert left.of_study(now).seconds == 2 * 20 + 120 + REPORT_S
    now = train(left, ("fa2", 1), train(left, ("baseline", 1), now, 10.0), 10.0)
    assert left.of_study(now).seconds == 120 + REPORT_S, "all runs are over"
    left.planting_planned(["fa2"], now)
    assert left.of_study(now + 20.0).seconds == 100 + REPORT_S


def test_what_is_measured_after_a_run_is_counted_of_the_last_one_too():
    left = study(planted=())
    now = train(left, ("baseline", 0), 0.0, 10.0)
    now = train(left, ("fa2", 0), now + 6.0, 10.0)
    # two more runs by 26 s for two, and the pause after the last of them
    assert left.of_study(now).seconds == 26 + 6 + REPORT_S
    now = train(left, ("fa2", 1), train(left, ("baseline", 1), now + 6.0, 10.0) + 6.0, 10.0)
    assert left.of_study(now + 2.0).seconds == 4 + REPORT_S
    assert left.of_study(now + 50.0).seconds == REPORT_S, "it takes longer, and no time is made up"


def test_a_candidate_that_fails_is_no_longer_counted():
    left = study(planted=(("fa2", 0), ("other", 0)))
    now = 0.0
    for run in RUNS:
        now = train(left, run, now, 10.0)
    assert left.of_study(now).seconds == 40 + 40 + REPORT_S
    left.planting_planned(["other"], now)
    assert left.of_study(now).seconds == 40 + REPORT_S
    left.planting_planned([], now)
    assert left.of_study(now).seconds == REPORT_S


@pytest.fixture
def planting():
    """Two candidates, on the first of which faults are planted from 40.0 on, usually for 40 s."""
    left = study(planted=(("fa2", 0), ("other", 0)))
    now = 0.0
    for run in RUNS:
        now = train(left, run, now, 10.0)
    left.planting_planned(["fa2", "other"], now)
    left.planting_advanced("fa2", 1, 96, "looks, 7 faults open", now + 10.0)
    return left


def test_planting_counts_down_and_beyond_its_usual_time_it_is_the_most_that_is_left(planting):
    planting.planting_advanced("fa2", 2, 96, "looks, 7 faults open", 51.0)
    found = planting.of_study(60.0)
    assert (found.seconds, found.at_most) == (20 + 40 + REPORT_S, False)
    planting.planting_advanced("fa2", 46, 96, "looks, 1 faults open", 95.0)
    found = planting.of_study(95.0)
    assert (found.seconds, found.at_most) == (50 + 40 + REPORT_S, True), "a second a look"


def test_it_is_no_longer_than_all_looks_that_may_come(planting):
    planting.planting_advanced("fa2", 95, 96, "looks, 1 faults open", 51.0)
    found = planting.of_study(51.0)
    assert found.seconds == pytest.approx(1 / 94 + 40 + REPORT_S)


def test_where_no_fault_is_open_the_next_candidate_is_all_that_is_left(planting):
    planting.planting_advanced("fa2", 6, 96, "looks, 0 faults open", 51.0)
    assert planting.of_study(51.0).seconds == 40 + REPORT_S
    planting.planting_advanced("other", 1, 96, "looks, 7 faults open", 56.0)
    # it has begun as the one before it was done
    assert planting.of_study(60.0).seconds == 40 - 9 + REPORT_S


def test_a_command_that_runs_once_more_is_bound_by_its_updates_and_looks(planting):
    planting.planting_advanced("fa2", 24, 24, "looks, 1 faults open", 73.0)
    planting.planting_advanced("fa2", 1, 96, "updates", 90.0)
    planting.planting_advanced("fa2", 11, 96, "updates", 95.0)
    found = planting.of_study(95.0)
    # 85 updates at half a second, and 96 looks at one
    assert (found.seconds, found.at_most) == (42.5 + 96 + 40 + REPORT_S, True)


def test_looks_that_begin_anew_are_timed_anew(planting):
    """Of a command that runs once more the updates may have passed unseen."""
    planting.planting_advanced("fa2", 24, 24, "looks, 1 faults open", 73.0)
    planting.planting_advanced("fa2", 1, 96, "looks, 1 faults open", 90.0)
    planting.planting_advanced("fa2", 3, 96, "looks, 1 faults open", 100.0)
    assert planting.of_study(100.0).seconds == 5 * 93 + 40 + REPORT_S


def test_of_a_run_that_was_resumed_what_was_made_before_took_no_time():
    left = TimeLeft(2, {("a", 0): 100, ("a", 1): 100})
    left.run_started(("a", 0), 100, 0.0)
    left.under_way["a", 0].reach(51, 1.0)
    left.under_way["a", 0].reach(100, 50.0)
    left.run_ended(("a", 0), 50.0)
    assert left.of_study(50.0).seconds == pytest.approx(100 + REPORT_S), "a second an update"


def test_of_a_study_whose_runs_were_kept_the_pace_of_looks_alone_is_known():
    left = study()
    for run in RUNS:
        left.run_ended(run, 0.0, is_kept=True)
    left.planting_planned(["fa2"], 0.0)
    assert left.of_study(1.0).seconds is None
    left.planting_advanced("fa2", 1, 96, "looks, 7 faults open", 10.0)
    left.planting_advanced("fa2", 6, 96, "looks, 7 faults open", 15.0)
    found = left.of_study(15.0)
    assert (found.seconds, found.at_most) == (90 + REPORT_S, True)
    left.report_begins(20.0)
    assert left.of_study(21.0).seconds == REPORT_S - 1
    assert left.of_study(90.0).seconds == 0
