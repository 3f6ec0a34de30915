"""The progress of a study that trains: a bar for each run, with its step, loss and time left.

The study's own bar tells the time left until all runs have ended, by what an update took since the
first run began: between two runs the clock goes on, and runs that were kept took none. Where it is
known how many updates each run makes, a run that ends early counts by its own. What is measured
after the runs is not in it, which is said as the first of several begins. Where there is
no terminal (a log file, CI) it is one line for each run that ends, with the time left where it has
finished. A long note that several runs have is written out of the first, and at the end it is said
of how many others it holds. The class is an observer of the study: a
`callbacks.study_observer.StudyObserver`.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from stability.report.terminal.tables import BAD, FINE, OPEN
from stability.report.view.plain_text import as_markup, readable

__all__ = ["StudyDisplay"]

NAME_WIDTH = 22
"""Shorter names of runs are filled up, so that what follows them stands in columns."""
UNKNOWN = "-:--:--"


@dataclass(slots=True)
class _Training:
    """A run that is under way."""

    bar: TaskID
    steps: int
    started: float
    step: int = 0
    loss: float | None = None
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
class _Assay:
    """Faults that are planted on a candidate."""

    of: tuple[str, str]
    """The arm, and what is counted: updates of its command, then looks."""
    bar: TaskID
    started: float
    first: int
    """How many were done when it was first told of them."""
    done: int = 0
    most: int = 0


class _Words(ProgressColumn):
    """A column of plain text, in the terminal's own colour: rich's are too faint on white.

    Where there is no room it stays whole and the names and the bars give way.
    """

    def __init__(self, words: Callable[[Task], str]) -> None:
        super().__init__(table_column=Column(no_wrap=True))
        self._words = words

    def render(self, task: Task) -> Text:
        """Return what the column says of a bar."""
        return Text(self._words(task), justify="right")


class _Names(ProgressColumn):
    """The column of names, each in one line, cut where there is no room."""

    def render(self, task: Task) -> Text:
        """Return the name of a bar."""
        return Text(task.description, no_wrap=True, overflow="ellipsis")


_OF_RUNS = "the time left is of the runs; measuring comes after them"
"""Said once: what drifts, gradients and planted faults will take is not known beforehand."""
_SHORT = 40
"""Characters of a note that is written out of each run: that it waits for another process."""
_BEGINS = 60
"""Characters of a note by which it is known again."""
_NAMED = 3
"""Runs of which a note holds too that are named; of more it is said how many there are."""


class StudyDisplay:
    """Show the progress of `total_runs` runs on `console`; use as a context manager.

    `updates` are those that each run makes, by arm and seed; without them all runs count alike.
    """

    def __init__(
        self,
        console: Console,
        total_runs: int,
        updates: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        known = updates or {}
        self._weights = {
            key: each * len(known) / sum(known.values()) for key, each in known.items()
        }
        self._progress = Progress(
            _Names(),
            BarColumn(bar_width=24),
            _Words(lambda task: f"{int(task.completed)}/{task.total or 0:.0f}"),
            TextColumn("{task.fields[note]}"),
            _Words(lambda task: _clock(task.elapsed)),
            _Words(self._left),
            console=console,
            disable=not console.is_terminal,
        )
        self._study = self._progress.add_task("study", total=total_runs, note="runs")
        self._total = total_runs
        self._done = 0
        self._ended = 0.0
        """The runs that are over, each by its weight, of a mean of 1; `_kept` and `_before` too."""
        self._kept = 0.0
        self._before = 0.0
        self._begun: float | None = None
        self._noted: dict[str, list[str]] = {}
        """The runs of which each note was said, each once."""
        self._runs: dict[tuple[str, int], _Training] = {}
        self._assay: _Assay | None = None

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_assay()
        self._say_whose_notes_hold()
        self._progress.stop()

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Show that run `index` of `total` (from 1) is training."""
        bar = self._progress.add_task(readable(f"{arm}, seed {seed}"), total=steps, note="loss -")
        self._runs[arm, seed] = _Training(bar, steps, time.monotonic())
        if self._begun is None:
            self._begun = time.monotonic()
            if self._progress.disable:  # in a log nothing moves until the first run has ended
                name = as_markup(f"{arm}, seed {seed}")
                self._progress.console.print(
                    f"[bold]{'training':>9}[/]  {name}   run {index} of {total}", highlight=False
                )
            if self._total > 1:
                self.study_noted(_OF_RUNS)

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        """Move the run's bar and the study's."""
        run = self._runs[arm, seed]
        run.reach(step, time.monotonic())
        run.loss = loss
        self._progress.update(run.bar, completed=step, note=_loss(loss))
        self._progress.update(self._study, completed=self._reached())

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Leave a line above the bars, unless it is a long one that was said of another run."""
        run, runs = f"{arm}, seed {seed}", self._noted.setdefault(text, [])
        if run not in runs:
            runs.append(run)
        if runs[0] == run or len(text) <= _SHORT:
            self._note(run, text)

    def _note(self, run: str, text: str) -> None:
        self._progress.console.print(
            f"[{OPEN}]{'note':>9}[/]  {as_markup(run)}   {as_markup(text)}", highlight=False
        )

    def _say_whose_notes_hold(self) -> None:
        """Say of how many runs each long note holds beside the first."""
        for text, (first, *others) in self._noted.items():
            if others and len(text) > _SHORT:
                many = len(others) > _NAMED
                whom = f"{len(others)} other runs" if many else " and ".join(others)
                begins = text if len(text) <= _BEGINS else f"{text[:_BEGINS].rstrip()}..."
                self._note(first, f'"{begins}" holds for {whom} too')
        self._noted.clear()

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """Leave a line above the bars."""
        self.run_noted(arm, seed, text)

    def assay_advanced(self, arm: str, done: int, most: int, what: str) -> None:
        """Move the bar of the faults that are planted on a candidate, one bar after another."""
        kind = what.partition(",")[0]
        if self._assay is None or self._assay.of != (arm, kind):
            self._remove_assay()
            name = readable(f"faults on {arm}")
            bar = self._progress.add_task(name, total=most, note=what)
            self._assay = _Assay((arm, kind), bar, time.monotonic(), done)
        self._assay.done, self._assay.most = done, most
        self._progress.update(self._assay.bar, completed=done, total=most, note=what)

    def _remove_assay(self) -> None:
        if self._assay is not None:
            self._progress.remove_task(self._assay.bar)
            self._assay = None

    def study_noted(self, text: str) -> None:
        """Leave a line above the bars."""
        self._progress.console.print(f"[bold]{'study':>9}[/]  {as_markup(text)}", highlight=False)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Count the run as done and leave a line above the bars."""
        run, weight = self._runs.pop((arm, seed), None), self._weights.get((arm, seed), 1.0)
        self._done += 1
        self._ended += weight
        self._progress.update(self._study, completed=self._done)
        note = as_markup(message)
        if message == "kept":
            self._kept += weight
            note = "already trained, kept"
        elif run is not None:
            self._progress.remove_task(run.bar)
            self._before += weight * run.before / run.steps
            if state == "finished":
                note = f"{time.monotonic() - run.started:5.1f} s   {_loss(run.loss)}"
                if self._progress.disable and self._done < self._total:
                    note += f"   {self._left_of_study()}"
        colour = {"finished": FINE, "failed": BAD}.get(state, OPEN)
        name = as_markup(f"{f'{arm}, seed {seed}':<{NAME_WIDTH}}")
        self._progress.console.print(f"[{colour}]{state:>9}[/]  {name}   {note}", highlight=False)

    def _reached(self) -> float:
        """Return how many runs have been made, those under way in part."""
        under_way = tuple(self._runs.values())  # rich asks from a thread of its own
        return self._done + sum(each.step / each.steps for each in under_way)

    def _left(self, task: Task) -> str:
        """Return the time left of a run, or of all runs until the last has ended."""
        if task.id != self._study:
            under_way = tuple(self._runs.values())
            run = next((each for each in under_way if each.bar == task.id), None)
            assay = self._assay
            if assay is not None and assay.bar == task.id:  # fewer looks may do
                made, most = assay.done - assay.first, assay.most - assay.first
                return f"left {_time_left(assay.started, made, most)}"
            if run is None:
                return f"left {UNKNOWN}"
            return f"left {_time_left(run.started, run.step - run.before, run.steps - run.before)}"
        return "measures now" if self._done == self._total else self._left_of_study()

    def _left_of_study(self) -> str:
        under_way = [
            (self._weights.get(key, 1.0) / run.steps, run)
            for key, run in tuple(self._runs.items())  # rich asks from a thread of its own
        ]
        spared = self._kept + self._before + sum(each * run.before for each, run in under_way)
        made = self._ended + sum(each * run.step for each, run in under_way)
        return f"left {_time_left(self._begun, made - spared, self._total - spared)}"


def _loss(loss: float | None) -> str:
    return "loss -" if loss is None else f"loss {loss:.3f}"


def _time_left(begun: float | None, made: float, total: float) -> str:
    """Return how long the rest of `total` takes if it goes on as since `begun`."""
    if begun is None or made <= 0:
        return UNKNOWN
    return _clock((time.monotonic() - begun) * (total - made) / made)


def _clock(seconds: float | None) -> str:
    """Return a time as 0:01:05."""
    return UNKNOWN if seconds is None else str(timedelta(seconds=round(seconds)))
