"""The progress of a study that trains: a bar for each run, with its step, loss and time left.

Where there is no terminal (a log file, CI) it is one line for each run that ends. The class is an
observer of the study: a `callbacks.study_observer.StudyObserver`.
"""

import time
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from stability.report.view.plain_text import as_markup

__all__ = ["StudyDisplay"]


@dataclass(slots=True)
class _Training:
    """A run that is under way."""

    bar: TaskID
    steps: int
    started: float
    step: int = 0
    loss: float = float("nan")


class StudyDisplay:
    """Show the progress of `total_runs` runs on `console`; use as a context manager."""

    def __init__(self, console: Console, total_runs: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=console,
            disable=not console.is_terminal,
        )
        self._study = self._progress.add_task("study", total=total_runs, note="runs")
        self._done = 0
        self._runs: dict[tuple[str, int], _Training] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Show that run `index` of `total` (from 1) is training."""
        bar = self._progress.add_task(f"{as_markup(arm)}, seed {seed}", total=steps, note="loss -")
        self._runs[arm, seed] = _Training(bar, steps, time.monotonic())

    def run_advanced(self, arm: str, seed: int, step: int, loss: float) -> None:
        """Move the run's bar and the study's."""
        run = self._runs[arm, seed]
        run.step, run.loss = step, loss
        self._progress.update(run.bar, completed=step, note=f"loss {loss:.3f}")
        under_way = sum(each.step / each.steps for each in self._runs.values())
        self._progress.update(self._study, completed=self._done + under_way)

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Leave a line above the bars."""
        self._progress.console.print(
            f"[yellow]{'note':>9}[/]  {as_markup(arm)}, seed {seed}   {as_markup(text)}",
            highlight=False,
        )

    def study_noted(self, text: str) -> None:
        """Leave a line above the bars."""
        self._progress.console.print(f"[cyan]{'study':>9}[/]  {as_markup(text)}", highlight=False)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Count the run as done and leave a line above the bars."""
        run = self._runs.pop((arm, seed), None)
        self._done += 1
        self._progress.update(self._study, completed=self._done)
        note = as_markup(message)
        if message == "kept":
            note = "already trained, kept"
        elif run is not None:
            self._progress.remove_task(run.bar)
            if state == "finished":
                note = f"{time.monotonic() - run.started:5.1f} s   loss {run.loss:.3f}"
        colour = {"finished": "green", "failed": "red"}.get(state, "yellow")
        self._progress.console.print(
            f"[{colour}]{state:>9}[/]  {as_markup(arm)}, seed {seed}   {note}", highlight=False
        )
