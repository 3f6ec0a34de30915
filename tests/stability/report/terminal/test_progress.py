"""The lines of a study in training: what a run took, the time left, names that nothing obeys."""

import io
import re
from functools import partial
from types import SimpleNamespace

import pytest
from rich.console import Console

from stability.report.terminal import progress
from stability.report.terminal.progress import StudyDisplay as _StudyDisplay

StudyDisplay = partial(_StudyDisplay, report=3.0)

ORDER = "\x1b]0;owned\x07\x1b[2J\x9b31m"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_and_messages_are_shown_and_not_obeyed(is_terminal):
    file = io.StringIO()
    console = Console(
        file=file, width=200, force_terminal=is_terminal, color_system=None, _environ={}
    )
    with StudyDisplay(console, 2) as display:
        display.run_started(1, 2, f"a[red]{ORDER}", 0, 10)
        display.run_noted(f"a[red]{ORDER}", 0, f"note {ORDER}")
        display.study_noted(f"faults on a[red]{ORDER}")
        display.run_ended(f"a[red]{ORDER}", 0, "failed", f"message {ORDER}")
    written = file.getvalue()
    assert not any(order in written for order in ("\x1b]0", "\x1b[2J", "\x07", "\x9b"))
    assert f"a[red]{SHOWN}, seed 0   note {SHOWN}" in written
    assert f"    study  faults on a[red]{SHOWN}" in written
    assert f"a[red]{SHOWN}, seed 0   message {SHOWN}" in written


def test_a_note_is_written_out_once_and_whose_it_is_is_said_at_the_end():
    file = io.StringIO()
    long = "no held-out loss: " + 20 * "why "
    with StudyDisplay(Console(file=file, width=200), 2) as display:
        for arm, text in (("a", long), ("b", long), ("b", "short"), ("a", "short"), ("b", "own")):
            display.run_noted(arm, 0, text)
        for arm in "cdef":
            display.run_noted(arm, 1, f"{long} still")
        for arm in "ab":
            display.run_noted(arm, 2, "held out: 16 samples that the script evaluates at 2 steps")
            display.run_noted(arm, 2, "not part of the batches' hash: what the loss alone is given")
    assert [line.strip() for line in file.getvalue().splitlines()] == [
        f"note  a, seed 0   (1) {long.strip()}",
        "note  b, seed 0   short",
        "note  a, seed 0   short",
        "note  b, seed 0   own",
        f"note  c, seed 1   (2) {long} still",
        "note  a, seed 2   (3) held out: 16 samples that the script evaluates at 2 steps",
        "note  a, seed 2   (4) not part of the batches' hash: what the loss alone is given",
        "note  a, seed 0   (1) holds for b, seed 0 too",
        "note  c, seed 1   (2) holds for d, seed 1 and e, seed 1 and f, seed 1 too",
        "note  a, seed 2   (3) and (4) hold for b, seed 2 too",
    ]


def test_what_is_said_again_of_a_run_is_said_again():
    """As after a run was damaged twice."""
    file = io.StringIO()
    with StudyDisplay(Console(file=file, width=200), 2) as display:
        for _ in range(2):
            display.run_noted("a", 0, "trained anew")
    assert file.getvalue().count("a, seed 0   trained anew") == 2


def test_without_a_terminal_each_run_that_ends_tells_the_time_left(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    with StudyDisplay(console, 3) as display:
        for number, arm in enumerate(("baseline", "nudge", "fa2"), start=1):
            display.run_started(number, 3, arm, 0, 10)
            clock[0] = 10.0 * number
            display.run_advanced(arm, 0, 10, 2.0)
            display.run_ended(arm, 0, "finished", "")
    first, *lines = file.getvalue().splitlines()
    assert first == " training  baseline, seed 0   run 1 of 3", "before anything has ended"
    # the report takes three seconds
    assert [line.partition("2.000")[2].strip() for line in lines] == [
        "left 0:00:23",
        "left 0:00:13",
        "left 0:00:03",
    ]


def test_a_run_that_ends_early_counts_by_its_updates(clock):
    """The time left doubled and halved as runs of a study's arms ended at unlike steps."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    runs = [("kept", 20), ("baseline", 40), ("reference", 20), ("nudge", 20), ("fa2", 40)]
    with StudyDisplay(console, 5, {(arm, 0): steps for arm, steps in runs}) as display:
        display.run_ended("kept", 0, "finished", "kept")
        for number, (arm, steps) in enumerate(runs[1:], start=1):
            display.run_started(number, 5, arm, 0, steps)
            clock[0] += steps
            display.run_advanced(arm, 0, steps, 2.0)
            display.run_ended(arm, 0, "finished", "")
    lines = [line.rpartition("left ")[2] for line in file.getvalue().splitlines() if "0:0" in line]
    assert lines == [
        "0:01:23",
        "0:01:03",
        "0:00:43",
        "0:00:03",
    ], "a second an update, whichever run it is of, and the report"


def test_a_loss_of_an_earlier_step_than_others_says_so(clock):
    """A rerun that ended half way stood there with a worse loss, as if it were broken."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    with StudyDisplay(console, 2) as display:
        for number, (arm, steps) in enumerate([("baseline", 40), ("rerun", 20)], start=1):
            display.run_started(number, 2, arm, 0, steps)
            display.run_advanced(arm, 0, steps, 2.0)
            display.run_ended(arm, 0, "finished", "")
    baseline, rerun = [line for line in file.getvalue().splitlines() if "finished" in line]
    assert "loss 2.000   left" in baseline
    assert "loss 2.000, step 20   left" in rerun


@pytest.mark.parametrize("kept", [3, 4])
def test_many_runs_that_were_trained_before_take_one_line(clock, kept):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    with StudyDisplay(console, kept + 1) as display:
        for seed in range(kept):
            display.run_ended("baseline", seed, "finished", "kept")
        display.run_ended("wild", 0, "diverged", "kept")
        display.run_started(kept + 1, kept + 1, "fa2", 0, 10)
    before, _, _ = file.getvalue().partition("training")
    lines = [" ".join(line.split()) for line in before.splitlines() if line.strip()]
    if kept == 4:
        assert lines[0] == "kept 4 runs already trained"
    else:
        assert lines[:3] == [f"finished baseline, seed {n} already trained, kept" for n in range(3)]
    assert lines[-1] == "diverged wild, seed 0 already trained, kept", "it is no finished one"


@pytest.fixture
def clock(monkeypatch):
    """What the display takes for the time, in seconds."""
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def last_frame(file):
    """The lines of the bars as they were drawn last."""
    drawn = file.getvalue().replace("\x1b[?25h", "")
    return re.split(r"\x1b\[2K", drawn)[-1].splitlines()


@pytest.mark.parametrize("kept", [0, 2])
def test_the_time_left_is_of_all_runs_with_what_lies_between_them(clock, kept):
    """Rich's own estimate took 15 s for 55: it forgets what a run takes to begin."""
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 4 + kept) as display:
        for seed in range(kept):
            display.run_ended("baseline", 10 + seed, "finished", "kept")
        clock[0] = 100.0
        display.run_started(1, 4, "baseline", 0, 10)
        clock[0] = 110.0
        display.run_advanced("baseline", 0, 10, 2.0)
        display.run_ended("baseline", 0, "finished", "")
        clock[0] = 120.0
        display.run_started(2, 4, "flash_fa2", 0, 10)
        clock[0] = 125.0
        display.run_advanced("flash_fa2", 0, 5, 2.0)
    finished = [x for x in file.getvalue().splitlines() if "finished" in x and "loss" in x]
    assert finished
    assert not any("left" in x for x in finished), "the bars tell it"
    assert "planted faults" not in file.getvalue(), "none are planted"
    study, run = last_frame(file)[-2:]
    # 2.5 of 4 runs, at 25 s for the first 1.5; a pause of 10 s after the last one, and the report
    assert study.endswith("left 0:00:55")
    assert run.endswith("left 0:00:05")
    assert max(map(len, (study, run))) <= 80


def test_steps_from_before_a_resume_are_not_taken_for_quick_ones(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 2) as display:
        clock[0] = 100.0
        display.run_started(1, 2, "baseline", 0, 1000)
        for step in (501, 502, 510):
            clock[0] = 100.0 + step - 500
            display.run_advanced("baseline", 0, step, 2.0)
    study, run = last_frame(file)[-2:]
    assert run.endswith("left 0:08:10")  # 490 steps, at a second each
    assert study.endswith("left 0:24:53")  # and another run of a thousand, and the report


def test_after_the_last_run_the_time_left_is_of_what_follows(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 1) as display:
        display.run_started(1, 1, "baseline", 0, 10)
        assert last_frame(file)[-2].endswith("left -:--:--")
        clock[0] = 10.0
        display.run_ended("baseline", 0, "finished", "")
        display._progress.refresh()
        assert "1/1 runs, measuring" in last_frame(file)[-1]
        clock[0] = 60.0
        display.report_begins()
        display._progress.refresh()
        assert "1/1 runs, report" in last_frame(file)[-1]
        assert last_frame(file)[-1].endswith("left 0:00:03")
        clock[0] = 62.0
    assert last_frame(file)[-1].endswith("left 0:00:01")


def test_faults_that_turn_out_not_to_be_planted_are_not_waited_for(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 1, {("fa2", 0): 10}, {("fa2", 0): 30}) as display:
        display.run_started(1, 1, "fa2", 0, 10)
        clock[0] = 10.0
        display.run_advanced("fa2", 0, 10, 2.0)
        display.run_ended("fa2", 0, "finished", "")
        display._progress.refresh()
        assert last_frame(file)[-1].endswith("left 0:00:33")
        display.assays_planned([])
    assert last_frame(file)[-1].endswith("left 0:00:03")


def test_of_one_run_of_a_study_no_report_is_waited_for(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    with _StudyDisplay(console, 1) as display:
        display.run_started(1, 1, "baseline", 0, 10)
        clock[0] = 10.0
        display.run_advanced("baseline", 0, 10, 2.0)
        display.run_ended("baseline", 0, "finished", "")
    assert file.getvalue().rstrip().endswith("left 0:00:00")


def test_faults_that_are_planted_have_a_bar_until_they_are_done(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 1, None, {("fused_attention", 0): 30}) as display:
        display.run_started(1, 1, "fused_attention", 0, 10)
        display.run_ended("fused_attention", 0, "finished", "")
        assert "the time left counts planted faults as they usually take" in file.getvalue()
        display.assays_planned(["fused_attention"])
        display.assay_advanced("fused_attention", 5, 24, "updates")
        clock[0] = 10.0
        display.assay_advanced("fused_attention", 24, 24, "updates")
        display._progress.refresh()
        assert "faults on" in last_frame(file)[-1]
        assert "24/24 updates" in last_frame(file)[-1]
        display.assay_advanced("fused_attention", 1, 24, "looks, 11 faults open")
        display._progress.refresh()
        assert last_frame(file)[-2].endswith("left -:--:--"), "nothing is known of its pace"
        clock[0] = 13.0
        display.assay_advanced("fused_attention", 4, 24, "looks, 2 faults open")
        clock[0] = 14.0
        display.assay_advanced("fused_attention", 5, 24, "looks, 2 faults open")
        display._progress.refresh()
        study, bar = last_frame(file)[-2:]
        assert "1/1 runs, measuring" in study
        # the run made no update, so that nothing is known of a pace but that of looks
        assert study.endswith("at most 0:00:22")
        assert "5/24 looks, 2 faults open" in bar
        assert "left" not in bar, "one line tells the time left"
        assert "at most" not in bar
        assert max(map(len, (study, bar))) <= 80
    assert "faults on" not in last_frame(file)[-1], "what is done leaves no bar"


def test_a_loss_that_was_not_seen_is_no_number():
    file = io.StringIO()
    with StudyDisplay(Console(file=file, width=80), 1) as display:
        display.run_started(1, 1, "baseline", 0, 10)
        display.run_advanced("baseline", 0, 10, None)
        display.run_ended("baseline", 0, "finished", "")
    assert "s   loss -" in file.getvalue()


def test_what_a_run_took_stands_in_a_column(clock):
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=False, color_system=None, _environ={})
    with StudyDisplay(console, 2) as display:
        for arm in ("baseline", "nudge"):
            display.run_started(1, 2, arm, 0, 10)
            display.run_advanced(arm, 0, 10, 2.0)
            display.run_ended(arm, 0, "finished", "")
    lines = [line for line in file.getvalue().splitlines() if "finished" in line]
    assert len({line.index(" s   loss 2.000") for line in lines}) == 1


@pytest.mark.parametrize("width", [60, 80])
def test_figures_stay_whole_and_long_names_give_way(clock, width):
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, color_system=None, _environ={})
    with StudyDisplay(console, 270) as display:
        display.run_started(1, 270, "an_arm_whose_name_is_long_enough_for_a_line", 100, 2000)
        clock[0] = 60.0
        display.run_advanced("an_arm_whose_name_is_long_enough_for_a_line", 100, 1500, 3.4567)
    study, run = last_frame(file)
    assert run.startswith("an_arm_")
    assert re.search(r"….* 1500/2000 loss 3\.457 0:\d\d:\d\d left 0:00:20$", run)
    assert re.search(r" 0/270 runs +0:\d\d:\d\d left 5:59:03$", study)
    assert max(map(len, (study, run))) <= width
