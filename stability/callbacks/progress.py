"""Tells an observer how far the runs of a study have come; the observer decides how to show it."""

from typing import Protocol

from lightning.pytorch import Trainer

from stability.callbacks.each_update import UpdateCallback

__all__ = ["ProgressCallback", "StudyObserver"]


class StudyObserver(Protocol):
    """What a display of a study must handle."""

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Run `index` of `total` (from 1) starts, or resumes, towards `steps`."""
        ...

    def run_advanced(self, arm: str, seed: int, step: int, loss: float) -> None:
        """A run has made `step` updates; `loss` is its last training loss."""
        ...

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Something about a run that its user should know, e.g. a record that was damaged."""
        ...

    def study_noted(self, text: str) -> None:
        """What is done while no run trains, and may take a while."""
        ...

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """A run is over: `state` as in its manifest, with a message if it failed."""
        ...


class ProgressCallback(UpdateCallback):
    """Pass each update of a run to the observer."""

    def __init__(self, observer: StudyObserver, arm: str, seed: int) -> None:
        self._observer = observer
        self._arm = arm
        self._seed = seed

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Report the step and the loss that Lightning logged for it."""
        loss = trainer.callback_metrics.get("train/loss")
        self._observer.run_advanced(
            self._arm,
            self._seed,
            trainer.global_step,
            float("nan") if loss is None else float(loss),
        )
