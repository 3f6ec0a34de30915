"""How long a study still takes: its runs, what is measured of them, planted faults, the report.

Runs. By what an update took since the first run began: between two runs the clock goes on, and runs
that were kept took none. Where it is known how many updates each run makes, a run that ends early
counts by its own, and a run to come goes on as those like it have: of its arm in another seed but
the first, in which an arm may be looked at, or of its seed. After them. A pause in which distances
are measured, as after the last run of an earlier seed, or before one has ended as between two runs;
the faults that are planted on a candidate, in updates of its own run of the first seed, by that
run's pace once it is known and before by that of all runs; and the report. How many looks planted
faults need is not known beforehand: what is over its usual time is told as the most that it may be.

Leaves out how it is shown (`progress`). All times are seconds of one clock.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

__all__ = ["Left", "TimeLeft", "Training"]

Run = tuple[str, int]
"""An arm and a seed."""


@dataclass(frozen=True, slots=True)
class Left:
    """The seconds that are left, if they are known, or the most that may be."""

    seconds: float | None
    at_most: bool = False


@dataclass(slots=True)
class Training:
    """A run that is under way."""

    steps: int
    started: float
    step: int = 0
    before: float = 0.0
    """Steps that it had made before, of a run that goes on from a checkpoint."""
    first: tuple[int, float] | None = None
    """The first step that was told of, and when."""

    def reach(self, step: int, now: float) -> None:
        """Take the step that it has reached, and how many were made before by the pace since."""
        self.step = step
        if self.first is None:
            self.first = step, now
            return
        at, then = self.first
        if step > at and now > then:
            pace = (step - at) / (now - then)
            self.before = max(0.0, at - pace * (then - self.started))


@dataclass(slots=True)
class _Planting:
    """Faults that are planted on a candidate now."""

    arm: str
    began: float
    is_looking: bool = False
    """Whether its looks are counted, and not the updates of its command."""
    counted: float = 0.0
    """When what is counted now was first told of."""
    first: int = 0
    done: int = 0
    most: int = 0
    look_seconds: float | None = None

    def advance(self, done: int, most: int, what: str, now: float) -> None:
        """Take how many were made of at most so many, of updates or of looks."""
        is_looking = what.startswith("looks")
        if is_looking != self.is_looking or not self.counted or done < self.done:
            self.is_looking, self.counted, self.first = is_looking, now, done
        self.done, self.most = done, 0 if what.startswith("looks, 0 ") else most
        if is_looking and done > self.first:
            self.look_seconds = (now - self.counted) / (done - self.first)

    def at_most(self, now: float) -> float | None:
        """Return the seconds until all updates and looks are made; None if that is not known."""
        if not self.most:
            return 0.0 if self.done else None
        made = self.done - self.first
        if self.is_looking:
            return (
                None if self.look_seconds is None else self.look_seconds * (self.most - self.done)
            )
        if made <= 0 or self.look_seconds is None:
            return None
        updates = (now - self.counted) * (self.most - self.done) / made
        return updates + self.look_seconds * self.most


@dataclass(slots=True)
class TimeLeft:
    """The time that is left of a study of `total` runs.

    `updates` are those that each run makes; without them all runs count alike. `planted` has the
    runs that faults are planted on, each with how many of its own updates take as long.
    """

    total: int
    updates: Mapping[Run, int] = field(default_factory=dict)
    planted: Mapping[Run, float] = field(default_factory=dict)
    report: float = 0.0
    """Seconds of the report; 0 where none is written."""
    under_way: dict[Run, Training] = field(default_factory=dict)
    done: int = 0
    """Runs that are over, the kept ones among them."""
    _ended: float = 0.0
    """The same, each by its weight, of a mean of 1; `_kept` and `_before` too."""
    _kept: float = 0.0
    _before: float = 0.0
    _begun: float | None = None
    _pauses: list[float] = field(default_factory=list)
    _of_seed: float | None = None
    """The last pause after all runs of a seed, in which most is measured."""
    _over_runs: set[Run] = field(default_factory=set)
    _last: Run | None = None
    """The run that ended last."""
    _over: float = 0.0
    """When the last run ended that is over."""
    _told: float = 0.0
    """When something was told last."""
    _paces: dict[Run, float] = field(default_factory=dict)
    """Seconds for an update of runs that have ended."""
    _busy: float = 0.0
    """Seconds of all runs that have ended, each of its own."""
    _waiting: list[Run] | None = None
    """The runs that faults are still to be planted on, once that is known for sure."""
    _planting: _Planting | None = None
    _reporting: float | None = None
    """When the report was begun."""

    @property
    def has_begun(self) -> bool:
        """Whether a run has."""
        return self._begun is not None

    @property
    def is_measuring(self) -> bool:
        """Whether all runs are over."""
        return self.done >= self.total or self._waiting is not None or self._reporting is not None

    def run_started(self, run: Run, steps: int, now: float) -> None:
        """Take a run that begins, or goes on, towards `steps`."""
        if self._begun is None:
            self._begun = now
        elif not self.under_way:
            pause = now - self._over
            self._pauses.append(pause)
            seed = self._last[1] if self._last else None
            of_seed = {each for each in self.updates if each[1] == seed}
            if of_seed and of_seed <= self._over_runs:
                self._of_seed = pause
        self.under_way[run] = Training(steps, now)

    def run_ended(self, run: Run, now: float, *, is_kept: bool = False) -> Training | None:
        """Take a run that is over; return what it was like under way."""
        known, weight = self.under_way.pop(run, None), self._weight(run)
        self.done += 1
        self._over_runs.add(run)
        self._last = run
        self._ended += weight
        if is_kept:
            self._kept += weight
        elif known is not None:
            self._over = self._told = now
            self._before += weight * known.before / known.steps
            made = known.step - known.before
            if made > 0:
                self._paces[run] = (now - known.started) / made
            self._busy += now - known.started
        return known

    def planting_planned(self, arms: Sequence[str], now: float) -> None:
        """Take on which arms faults are planted, in this order, now that all runs are over."""
        self._told = now
        seeds = dict(self.planted.keys())
        self._waiting = [(arm, seeds.get(arm, 0)) for arm in arms]

    def planting_advanced(self, arm: str, done: int, most: int, what: str, now: float) -> None:
        """Take how far the planting on an arm is: `what` is its looks, or updates before them."""
        if self._planting is None or self._planting.arm != arm:
            waiting = self._waiting or []
            place = next((i for i, (name, _) in enumerate(waiting) if name == arm), -1)
            self._waiting = waiting[place + 1 :]
            # where it began nothing is told, and nothing is done between two
            self._planting = _Planting(arm, self._told or now)
        self._told = now
        self._planting.advance(done, most, what, now)

    def report_begins(self, now: float) -> None:
        """Take that the report is all that is left."""
        self._reporting = now

    def of_study(self, now: float) -> Left:
        """Return the time left of all of it."""
        if self._reporting is not None:
            return Left(max(0.0, self.report - (now - self._reporting)))
        after = self._after(now)
        runs = 0.0 if self.is_measuring else self._of_runs(now)
        if runs is None or after.seconds is None:
            return Left(None)
        return Left(runs + after.seconds + self.report, after.at_most)

    def of_run(self, run: Run, now: float) -> Left:
        """Return the time left of a run that is under way."""
        known = self.under_way.get(run)
        if known is None:
            return Left(None)
        made, steps = known.step - known.before, known.steps - known.before
        return Left(_time_left(known.started, made, steps, now))

    def reached(self) -> float:
        """Return how many runs have been made, those under way in part."""
        under_way = tuple(self.under_way.values())  # rich asks from a thread of its own
        return self.done + sum(each.step / each.steps for each in under_way)

    def _weight(self, run: Run) -> float:
        whole = sum(self.updates.values())
        known = run in self.updates and whole
        return self.updates[run] * len(self.updates) / whole if known else 1.0

    def _made(self) -> tuple[float, float]:
        """Return the runs that were made since the first one began, and all that were to be."""
        under_way = tuple(self.under_way.items())  # rich asks from a thread of its own
        parts = [(self._weight(key) / run.steps, run) for key, run in under_way]
        spared = self._kept + self._before + sum(each * run.before for each, run in parts)
        made = self._ended + sum(each * run.step for each, run in parts)
        return made - spared, self.total - spared

    def _of_runs(self, now: float) -> float | None:
        """Return the time until all runs are over.

        Runs to come go on as those like them have gone, and not as the one under way: one that is
        looked at may take many times as long. As many are taken to be under way at once as have
        been, which is less than one where there were pauses.
        """
        if not self._paces or not self.updates:
            return _time_left(self._begun, *self._made(), now)
        busy, left = self._busy, 0.0
        under_way = dict(self.under_way.items())  # rich asks from a thread of its own
        for run in self.updates.keys() - self._over_runs:
            known, pace = under_way.get(run), self._expected(run)
            steps: float = self.updates[run]
            if known is not None:
                busy += now - known.started
                made, steps = known.step - known.before, known.steps - known.step
                pace = (now - known.started) / made if made > 0 else pace
            left += steps * pace
        assert self._begun is not None
        return left * (now - self._begun) / busy if busy > 0 else None

    def _expected(self, run: Run) -> float:
        """Return the seconds for an update of a run to come: those of runs like it so far."""
        arm, seed = run
        first = next(iter(self.updates))[1]
        alike = [
            [pace for (a, s), pace in self._paces.items() if a == arm and s != first],
            [pace for (_, s), pace in self._paces.items() if (s == first) == (seed == first)],
            [*self._paces.values()],
        ]
        return median(next(each for each in alike if each))

    def _after(self, now: float) -> Left:
        """Return the time of what follows the runs, the report left out."""
        pause = self._of_seed
        if pause is None:
            pause = sum(self._pauses) / len(self._pauses) if self._pauses else 0.0
        if self._planting is None:
            idle = now - self._over if self.is_measuring and self._over else 0.0
            waiting = self._usual([*self.planted] if self._waiting is None else self._waiting, now)
            return Left(None if waiting is None else max(0.0, waiting + pause - idle))
        others = self._usual(self._waiting or [], now)
        own = self._of_planting(self._planting, now)
        if others is None or own.seconds is None:
            return Left(None)
        return Left(own.seconds + others, own.at_most)

    def _of_planting(self, planting: _Planting, now: float) -> Left:
        most = planting.at_most(now)
        run = next((run for run in self.planted if run[0] == planting.arm), None)
        usual = self._usual([run], now) if run else None
        rest = 0.0 if usual is None else usual - (now - planting.began)
        if rest > 0:
            return Left(rest if most is None else min(rest, most))
        return Left(most, at_most=bool(most))

    def _usual(self, runs: Sequence[Run], now: float) -> float | None:
        """Return what planting on `runs` usually takes; None if nothing is known of a pace."""
        whole = 0.0
        for run in runs:
            pace = self._pace(run, now)
            if pace is None or run not in self.planted:
                return None
            whole += self.planted[run] * pace
        return whole

    def _pace(self, run: Run, now: float) -> float | None:
        """Return the seconds for an update of a run: its own, or those of the runs so far."""
        if run in self._paces:
            return self._paces[run]
        made, _ = self._made()
        if self._begun is None or made <= 0:
            return None
        until = self._over if self.is_measuring else now
        steps = sum(self.updates.values()) / len(self.updates) if self.updates else 0
        return (until - self._begun) / made / steps if steps else None


def _time_left(begun: float | None, made: float, total: float, now: float) -> float | None:
    """Return how long the rest of `total` takes if it goes on as since `begun`; None: not known."""
    if begun is None or made <= 0:
        return None
    return (now - begun) * (total - made) / made
