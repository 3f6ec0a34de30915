"""What a display of a study is told: how far its runs have come, and how each ended.

Whoever records other people's scripts needs no Lightning for it, so none is imported here.
"""

from collections.abc import Sequence
from typing import Protocol

__all__ = ["StudyObserver"]


class StudyObserver(Protocol):
    """What a display of a study must handle."""

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Run `index` of `total` (from 1) starts, or resumes, towards `steps`."""
        ...

    def run_advanced(self, arm: str, seed: int, step: int, loss: float | None) -> None:
        """A run has made `step` updates; `loss` is its last training loss, None if not seen."""
        ...

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Something about a run that its user should know, e.g. a record that was damaged."""
        ...

    def wandb_failed(self, arm: str, seed: int, text: str) -> None:
        """W&B can't be reached from a run, so that no run that starts later tries it."""
        ...

    def study_noted(self, text: str) -> None:
        """What is done while no run trains, and may take a while."""
        ...

    def assays_planned(self, arms: Sequence[str]) -> None:
        """All runs are over, and known faults are going to be planted on these candidates."""
        ...

    def assay_advanced(self, arm: str, done: int, most: int, what: str) -> None:
        """Known faults are planted on a candidate: `done` of at most so many `what` are made."""
        ...

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """A run is over: `state` as in its manifest, with a message if it failed."""
        ...
