"""The progress of a study that trains: a bar for each run, with its step, loss and time left.

The study's own bar tells the time left of the whole study, runs and what follows (`time_left`),
until the report is written; that planted faults may take longer is said as the first run begins.
Where there is no terminal (a log file, CI) it is one line for each run that ends, with the time
left where it has finished. A long note that several runs have is written out of the first, with a
number, and at the end it is said of how many others the note of that number holds. The class is an
observer of the study: a
`callbacks.study_observer.StudyObserver`.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TextColumn
from rich.table import Column
from rich.text import Text

from stability.report.terminal.tables import BAD, FINE, OPEN
from stability.report.terminal.time_left import Left, TimeLeft
from stability.report.view.plain_text import as_markup, readable

__all__ = ["StudyDisplay"]

NAME_WIDTH = 22
"""Shorter names of runs are filled up, so that what follows them stands in columns."""
UNKNOWN = "-:--:--"


@dataclass(slots=True)
class _Bar:
    """A run's bar, and the last loss that was told."""

    task: TaskID
    steps: int
    loss: float | None = None


@dataclass(slots=True)
class _Assay:
    """The bar of faults that are planted on a candidate."""

    of: tuple[str, str]
    """The arm, and what is counted: updates of its command, then looks."""
    bar: TaskID


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


_MAY_TAKE_LONGER = (
    "the time left counts planted faults as they usually take; some take longer, and on an arm "
    "that fails none are planted"
)
"""Said once, of a study that plants some: neither is known before all runs are over."""
_SHORT = 40
"""Characters of a note that is written out of each run: that it waits for another process."""
_NAMED = 3
"""Runs of which a note holds too that are named; of more it is said how many there are."""


class StudyDisplay:
    """Show the progress of `total_runs` runs on `console`; use as a context manager.

    `updates` are those that each run makes, by arm and seed; without them all runs count alike.
    `planted` has the runs that faults will be planted on, each with how many of its own updates
    that usually takes. `report` has the seconds of the study's report, 0 if none follows.
    """

    def __init__(
        self,
        console: Console,
        total_runs: int,
        updates: Mapping[tuple[str, int], int] | None = None,
        planted: Mapping[tuple[str, int], float] | None = None,
        *,
        report: float = 0.0,
    ) -> None:
        self._time_left = TimeLeft(total_runs, updates or {}, planted or {}, report=report)
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
        self._noted: dict[str, list[str]] = {}
        """The runs of which each note was said, each once."""
        self._numbers: dict[str, int] = {}
        """By which each long note is known again."""
        self._runs: dict[tuple[str, int], _Bar] = {}
        self._kept: list[tuple[str, str]] = []
        """State and name of the runs that were trained before, and of which nothing is said yet."""
        self._longest = 0
        """The most updates of a run."""
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
        self._say_what_is_kept()
        self._say_whose_notes_hold()
        self._progress.stop()

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Show that run `index` of `total` (from 1) is training."""
        self._say_what_is_kept()
        bar = self._progress.add_task(readable(f"{arm}, seed {seed}"), total=steps, note="loss -")
        self._runs[arm, seed] = _Bar(bar, steps)
        self._longest = max(self._longest, steps)
        is_first = not self._time_left.has_begun
        self._time_left.run_started((arm, seed), steps, time.monotonic())
        if is_first:
            if self._progress.disable:  # in a log nothing moves until the first run has ended
                name = as_markup(f"{arm}, seed {seed}")
                self._progress.console.print(
                    f"[bold]{'training':>9}[/]  {name}   run {index} of {total}", highlight=False
                )
            if self._time_left.planted:
                self.study_noted(_MAY_TAKE_LONGER)

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        """Move the run's bar and the study's."""
        self._time_left.under_way[arm, seed].reach(step, time.monotonic())
        bar = self._runs[arm, seed]
        bar.loss = loss
        self._progress.update(bar.task, completed=step, note=_loss(loss))
        self._progress.update(self._study, completed=self._time_left.reached())

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Leave a line above the bars, unless it is a long one that was said of another run."""
        run, runs = f"{arm}, seed {seed}", self._noted.setdefault(text, [])
        if run not in runs:
            runs.append(run)
        if len(text) <= _SHORT:
            self._note(run, text)
        elif runs[0] == run:
            number = self._numbers.setdefault(text, len(self._numbers) + 1)
            self._note(run, f"({number}) {text}")

    def _note(self, run: str, text: str) -> None:
        self._progress.console.print(
            f"[{OPEN}]{'note':>9}[/]  {as_markup(run)}   {as_markup(text)}", highlight=False
        )

    def _say_whose_notes_hold(self) -> None:
        """Say of how many runs each long note holds beside the first."""
        alike: dict[tuple[str, ...], list[str]] = {}
        for text, runs in self._noted.items():
            if len(runs) > 1 and len(text) > _SHORT:
                alike.setdefault(tuple(runs), []).append(f"({self._numbers[text]})")
        for (first, *others), numbers in alike.items():
            many = len(others) > _NAMED
            whom = f"{len(others)} other runs" if many else " and ".join(others)
            hold = "holds" if len(numbers) == 1 else "hold"
            self._note(first, f"{' and '.join(numbers)} {hold} for {whom} too")
        self._noted.clear()

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """Leave a line above the bars."""
        self.run_noted(arm, seed, text)

    def assays_planned(self, arms: Sequence[str]) -> None:
        """Count the faults that are planted on these candidates in what is left."""
        self._time_left.planting_planned(arms, time.monotonic())
        self._progress.update(self._study, note="runs, measuring")

    def assay_advanced(self, arm: str, done: int, most: int, what: str) -> None:
        """Move the bar of the faults that are planted on a candidate, one bar after another."""
        self._time_left.planting_advanced(arm, done, most, what, time.monotonic())
        kind = what.partition(",")[0]
        if self._assay is None or self._assay.of != (arm, kind):
            self._remove_assay()
            name = readable(f"faults on {arm}")
            bar = self._progress.add_task(name, total=most, note=what)
            self._assay = _Assay((arm, kind), bar)
        self._progress.update(self._assay.bar, completed=done, total=most, note=what)

    def _remove_assay(self) -> None:
        if self._assay is not None:
            self._progress.remove_task(self._assay.bar)
            self._assay = None

    def report_begins(self) -> None:
        """Show that the report is written, which is the last of a study."""
        self._remove_assay()
        self._time_left.report_begins(time.monotonic())
        self._progress.update(self._study, note="runs, report")

    def study_noted(self, text: str) -> None:
        """Leave a line above the bars."""
        self._progress.console.print(f"[bold]{'study':>9}[/]  {as_markup(text)}", highlight=False)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Count the run as done and leave a line above the bars."""
        now, bar = time.monotonic(), self._runs.pop((arm, seed), None)
        run = self._time_left.run_ended((arm, seed), now, is_kept=message == "kept")
        self._progress.update(self._study, completed=self._time_left.done)
        if self._time_left.done == self._total:
            self._progress.update(self._study, note="runs, measuring")
        if message == "kept":
            self._kept.append((state, f"{arm}, seed {seed}"))
            return
        note = as_markup(message)
        if run is not None and bar is not None:
            self._progress.remove_task(bar.task)
            if state == "finished":
                # beside others' losses, which are of later updates
                at = f", step {bar.steps}" if bar.steps < self._longest else ""
                note = f"{now - run.started:5.1f} s   {_loss(bar.loss)}{at}"
                if self._progress.disable:
                    note += f"   {_left(self._time_left.of_study(now))}"
        self._say_what_is_kept()
        self._say_end(state, f"{arm}, seed {seed}", note)

    def _say_what_is_kept(self) -> None:
        """Say which runs were trained before: of many how many they are."""
        kept, self._kept = self._kept, []
        finished = [name for state, name in kept if state == "finished"]
        if len(finished) > _NAMED:
            self._say_end("kept", f"{len(finished)} runs", "already trained")
            kept = [(state, name) for state, name in kept if state != "finished"]
        for state, name in kept:
            self._say_end(state, name, "already trained, kept")

    def _say_end(self, state: str, name: str, note: str) -> None:
        colour = {"finished": FINE, "kept": FINE, "failed": BAD}.get(state, OPEN)
        name = as_markup(f"{name:<{NAME_WIDTH}}")
        self._progress.console.print(f"[{colour}]{state:>9}[/]  {name}   {note}", highlight=False)

    def _left(self, task: Task) -> str:
        """Return the time left of a run or of the whole study.

        Planted faults have none of their own: the study's counts them as they usually take, and a
        bound beside it, which may be several times as long, would be a second answer.
        """
        now, assay = time.monotonic(), self._assay
        if task.id == self._study:
            return _left(self._time_left.of_study(now))
        if assay is not None and assay.bar == task.id:
            return ""
        under_way = tuple(self._runs.items())  # rich asks from a thread of its own
        run = next((run for run, bar in under_way if bar.task == task.id), None)
        return _left(self._time_left.of_run(run, now) if run else Left(None))


def _loss(loss: float | None) -> str:
    return "loss -" if loss is None else f"loss {loss:.3f}"


def _left(left: Left) -> str:
    is_bound = left.at_most and left.seconds is not None
    return f"{'at most' if is_bound else 'left'} {_clock(left.seconds)}"


def _clock(seconds: float | None) -> str:
    """Return a time as 0:01:05."""
    return UNKNOWN if seconds is None else str(timedelta(seconds=round(seconds)))
