"""Tells an observer how far a run of Lightning's has come."""

from collections.abc import Callable

from lightning.pytorch import Trainer

from stability.callbacks.each_update import UpdateCallback
from stability.callbacks.study_observer import StudyObserver

__all__ = ["ProgressCallback"]


class ProgressCallback(UpdateCallback):
    """Pass each update of a run to the observer; `loss` gives that of the last one."""

    def __init__(
        self, observer: StudyObserver, arm: str, seed: int, loss: Callable[[], float]
    ) -> None:
        self._observer = observer
        self._arm = arm
        self._seed = seed
        self._loss = loss

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Report the step and the update's loss, over all micro-batches and ranks."""
        self._observer.run_advanced(self._arm, self._seed, trainer.global_step, self._loss())
