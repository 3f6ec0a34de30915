"""Tells an observer how far the study is; the observer decides how it looks."""

from typing import Any, Protocol

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["ProgressCallback", "StudyObserver"]


class StudyObserver(Protocol):
    """What a display of a study is told."""

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Run `index` of `total` (from 1) starts, or goes on, towards `steps`."""
        ...

    def run_advanced(self, step: int, loss: float) -> None:
        """The current run has made `step` updates; `loss` is its last logged training loss."""
        ...

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """The current run is over: `state` as in its manifest, with a message if it failed."""
        ...


class ProgressCallback(Callback):
    """Pass each update of a run to the observer."""

    def __init__(self, observer: StudyObserver) -> None:
        self._observer = observer

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Report the step and the loss that Lightning logged for it."""
        loss = trainer.callback_metrics.get("train/loss")
        self._observer.run_advanced(
            trainer.global_step, float("nan") if loss is None else float(loss)
        )
