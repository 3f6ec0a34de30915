"""Stands in for `wandb.init`, so that what is published of a study is seen without starting W&B.

A run of W&B costs seconds, and a trial has a tenth of one. What is sent is printed line by line: it
is held against what is on record, as all that a verb prints.
"""

from pathlib import Path
from typing import Any

from stability.cli.output import print_json

__all__ = ["OfflineRun"]


class OfflineRun:
    """Takes what `wandb.init` and a `wandb.Run` are given, and prints the numbers."""

    starting_step = 0

    def __init__(self, **given: Any) -> None:
        self.summary: dict[str, Any] = {}
        if given:
            folder = Path(given["dir"]) / "wandb" / f"offline-run-0-{given['id']}" / "files"
            folder.mkdir(parents=True, exist_ok=True)
            self.dir = str(folder)

    def define_metric(self, *_: Any, **__: Any) -> None:
        """Do nothing."""

    def alert(self, *_: Any, **__: Any) -> None:
        """Do nothing: W&B shows the text, no terminal."""

    def log(self, row: dict[str, Any], **_: Any) -> None:
        """Print the numbers of a row; tables and histograms have been made, and that will do."""
        print_json({name: x for name, x in row.items() if isinstance(x, float | int)})

    def finish(self, **_: Any) -> None:
        """Print the summary."""
        print_json(self.summary)
