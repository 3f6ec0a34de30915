"""Logs the training loss of each step to every logger, before a checkpoint of that step is saved.

Lightning's own `self.log` writes after the checkpoint callback has run, so a run killed in between
would come back without that line. Leaves out everything but the loss.
"""

from typing import Any

from lightning.pytorch import Callback, Trainer
from torch import Tensor

from stability.callbacks.each_update import UpdateCallback
from stability.records.metric_log import MetricLog
from stability.records.metric_names import TRAIN_LOSS

__all__ = ["LogPosition", "TrainingLog"]


class TrainingLog(UpdateCallback):
    """Log `train/loss` at every `every`-th step: the loss on weights after that many updates.

    With gradient accumulation it is the mean over the step's micro-batches: Lightning has divided
    each one's loss by their number.
    """

    def __init__(self, every: int) -> None:
        self._every = every
        self._loss: Tensor | float = 0.0

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Begin the step's loss."""
        self._loss = 0.0

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add up the step's loss."""
        self._loss = self._loss + outputs["loss"].detach()

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Log it if the step is due."""
        if step % self._every != 0:
            return
        for logger in trainer.loggers:
            logger.log_metrics({TRAIN_LOSS: float(self._loss)}, step=step)


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
