"""Which steps are due, and how a budget shares them among layers."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.probe import schedule
from stability.probe.schedule import Budget, Schedule

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("schedule", "due"),
    [
        (Schedule(), []),
        (Schedule(every=1), [0, 1, 2, 3, 4, 5, 6]),
        (Schedule(every=3), [0, 3, 6]),
        (Schedule(steps=(1, 5)), [1, 5]),
        (Schedule(every=4, steps=(1,)), [1]),
        (Schedule(every=4, steps=(3,), per_decade=1), [0, 1, 3]),
    ],
)
def test_schedule_names_multiples_and_listed_steps(schedule, due):
    assert [step for step in range(7) if schedule.is_due(step)] == due


def test_log_spaced_steps_are_the_rounded_powers():
    schedule = Schedule(per_decade=3)
    due = [step for step in range(1100) if schedule.is_due(step)]
    assert due == [0, 1, 2, 5, 10, 22, 46, 100, 215, 464, 1000]


@settings(max_examples=50)
@given(per_decade=st.integers(1, 12), step=st.integers(1, 10**6))
def test_log_spaced_steps_leave_no_gap_wider_than_their_ratio(per_decade, step):
    schedule = Schedule(per_decade=per_decade)
    reach = int(step * 10 ** (1 / per_decade)) + 2
    if reach - step < 5000:
        assert any(schedule.is_due(later) for later in range(step, reach))


@pytest.mark.parametrize(
    "options", [{"every": -1}, {"per_decade": -2}, {"steps": (3, -1)}], ids=lambda o: next(iter(o))
)
def test_a_negative_number_is_refused(options):
    with pytest.raises(ValueError, match=f"Schedule: {next(iter(options))} must be >= 0, got -"):
        Schedule(**options)


class _Clock:
    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(schedule.time, "perf_counter", lambda: self.now)


def _train(clock, budget, layers, steps, step_cost, look_cost):
    """Train with a probe at each step; return how often each layer was looked at."""
    looks = dict.fromkeys(layers, 0)
    for _ in range(steps):
        budget.begin_step()
        for layer in layers:
            clock.now += step_cost / len(layers)
            if budget.grants(layer):
                with budget.spending(CPU):
                    clock.now += look_cost
                looks[layer] += 1
    return looks


def test_a_budget_is_held_and_shared_among_layers(monkeypatch):
    clock = _Clock(monkeypatch)
    looks = _train(clock, Budget(0.05), "abcd", 400, step_cost=1.0, look_cost=0.5)
    spent = 0.5 * sum(looks.values())
    assert 0.045 <= spent / clock.now <= 0.05 + 0.5 / clock.now
    assert max(looks.values()) - min(looks.values()) <= 1


def test_a_look_that_was_granted_and_never_timed_leaves_the_next_step_its_one_look(monkeypatch):
    """A granted call may not be compared, and CUDA's time of one is read steps later."""
    clock, budget = _Clock(monkeypatch), Budget(0.05)
    granted = []
    for _ in range(4):
        budget.begin_step()
        granted.append([layer for layer in "ab" if budget.grants(layer)])
        clock.now += 1.0
    assert granted[0] == ["a"]
    assert all(len(layers) == 1 for layers in granted)


def test_no_budget_grants_everything(monkeypatch):
    looks = _train(_Clock(monkeypatch), Budget(0.0), "abc", 5, step_cost=1.0, look_cost=100.0)
    assert set(looks.values()) == {5}


def test_a_generous_budget_looks_at_every_layer(monkeypatch):
    looks = _train(_Clock(monkeypatch), Budget(0.9), "abc", 50, step_cost=1.0, look_cost=0.01)
    assert min(looks.values()) >= 48
