"""The display of a running study: which run of how many, its step, its loss, the time left.

On a terminal two live bars; elsewhere (a log file, CI) one line for each run that ends. Satisfies
`callbacks.progress.StudyObserver`.
"""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

__all__ = ["StudyDisplay"]


class StudyDisplay:
    """Show the progress of `total_runs` runs on `console`; use as a context manager."""

    def __init__(self, console: Console, total_runs: int) -> None:
        self._console = console
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
        self._run = self._progress.add_task("", total=1, note="", visible=False)
        self._done = 0
        self._steps = 1
        self._started = time.monotonic()
        self._loss = float("nan")

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
        self._steps = steps
        self._started = time.monotonic()
        self._progress.reset(
            self._run,
            total=steps,
            description=f"{escape(arm)}, seed {seed}",
            note="loss -",
            visible=True,
        )

    def run_advanced(self, step: int, loss: float) -> None:
        """Move both bars to `step` of the current run."""
        self._loss = loss
        self._progress.update(self._run, completed=step, note=f"loss {loss:.3f}")
        self._progress.update(self._study, completed=self._done + step / self._steps)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Count the run as done and leave a line above the bars."""
        self._done += 1
        self._progress.update(self._study, completed=self._done)
        colour = {"finished": "green", "failed": "red"}.get(state, "yellow")
        seconds = f"{time.monotonic() - self._started:5.1f} s" if message != "kept" else "   kept"
        note = escape(message) if state != "finished" else f"{seconds}   loss {self._loss:.3f}"
        if message == "kept":
            note = "already trained, kept"
        self._progress.console.print(
            f"[{colour}]{state:>9}[/]  {escape(arm)}, seed {seed}   {note}", highlight=False
        )
