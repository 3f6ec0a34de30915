"""Logs the training loss of each step to every logger, before a checkpoint of that step is saved.

Lightning's own `self.log` writes after the checkpoint callback has run, so a run killed in between
would come back without that line. Leaves out everything but the loss.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from stability.records.metric_log import MetricLog
from stability.records.names import TRAIN_LOSS

__all__ = ["LogPosition", "TrainingLog"]


class TrainingLog(Callback):
    """Log `train/loss` at every `every`-th step: the loss on weights after that many updates.

    With gradient accumulation it is the mean over the step's micro-batches: Lightning has divided
    each one's loss by their number.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._step = -1
        self._loss: Tensor | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Remember the step that this batch belongs to."""
        if trainer.global_step != self._step:
            self._loss = None
        self._step = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add up the step's loss, and log it when the update has been made."""
        loss: Tensor = outputs["loss"].detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if trainer.global_step == self._step or self._step % self._every != 0:
            return
        for logger in trainer.loggers:
            logger.log_metrics({TRAIN_LOSS: self._loss.item()}, step=self._step)


class LogPosition(Callback):
    """Store in each checkpoint how long the metric log was, and cut it there on a resume."""

    def __init__(self, log: MetricLog) -> None:
        self._log = log

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the log in bytes."""
        return {"position": self._log.position()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Drop what was logged after the checkpoint."""
        self._log.truncate_to(state_dict["position"])
