"""Tells an observer how far a run of Lightning's has come."""

from lightning.pytorch import Trainer

from stability.callbacks.each_update import UpdateCallback
from stability.callbacks.study_observer import StudyObserver

__all__ = ["ProgressCallback"]


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
