"""The clock of a trial: when each update has ended, and when the trial has."""

import pytest

from stability.recorder.inside import update_clock
from stability.recorder.inside.update_clock import UpdateClock
from stability.recorder.launch import Asked, environment_of


@pytest.fixture
def now(monkeypatch):
    """What the clock takes for the time, in seconds."""
    told = [1000.0]
    monkeypatch.setattr(update_clock, "time_when_idle", lambda: told[0])
    monkeypatch.setattr(update_clock.time, "monotonic", lambda: told[0])
    return told


def made(clock, now, seconds, ranks=1):
    """Make updates until the clock ends them; return how many."""
    for step, took in enumerate(seconds, start=1):
        now[0] += took
        if clock.ends_trial(step, ranks):
            return step
    return None


def test_no_update_is_begun_once_the_time_is_over(now):
    clock = UpdateClock("4 20")
    # what the first one takes is no part of it: it chooses code, and may compile
    assert made(clock, now, [100, *([3] * 20)]) == 8
    assert clock.told()["clock"]["ended"] == [1100 + 3 * i for i in range(8)]
    assert clock.is_over


def test_the_least_are_made_however_long_they_take(now):
    assert made(UpdateClock("6 20"), now, [50] * 20) == 6


def test_quick_updates_are_left_to_end_as_planned(now):
    clock = UpdateClock("4 20")
    assert made(clock, now, [0.5] * 24) is None
    assert not clock.told()["clock"]["is_over"]


def test_ranks_end_with_the_same_update(now):
    """By clocks of their own one may wait for the others for ever."""
    assert made(UpdateClock("6 20"), now, [0.1] * 20, ranks=2) == 6


def test_only_a_trial_has_a_clock(monkeypatch):
    """One that a shell, or a trial around it, has in its variables is not handed on."""
    monkeypatch.setenv("STABILITY_TRIAL", "4 20")
    asked = Asked(seed=0, steps=3)
    assert environment_of(asked, {})["STABILITY_TRIAL"] == ""
    assert environment_of(asked, {"STABILITY_TRIAL": "6 8"})["STABILITY_TRIAL"] == "6 8"
