"""The training loss of each update: logged, and watched for divergence.

Lightning's own `self.log` writes after the checkpoint callback has run, so a run that is killed in
between would come back without that line. `TrainingLog` writes before.
"""

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from stability.callbacks.each_update import UpdateCallback
from stability.records.metric_names import TRAIN_LOSS

__all__ = ["PATIENCE", "Divergence", "TrainingLog"]

PATIENCE = 5
"""Updates in a row with a loss that is not finite, before the run is stopped."""


class _LossCallback(UpdateCallback):
    """Adds up the loss of an update.

    With gradient accumulation the sum is the mean over the micro-batches: Lightning has divided
    each one's loss by their number.
    """

    _loss: Tensor | float = 0.0

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Start from zero."""
        self._loss = 0.0

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add a micro-batch's loss."""
        self._loss = self._loss + outputs["loss"].detach()


class TrainingLog(_LossCallback):
    """Log `train/loss` at every `every`-th step: the loss on weights after that many updates."""

    def __init__(self, every: int) -> None:
        self._every = every

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Log the loss if the step is due."""
        if step % self._every != 0:
            return
        for logger in trainer.loggers:
            logger.log_metrics({TRAIN_LOSS: float(self._loss)}, step=step)


class Divergence(_LossCallback):
    """Stop the trainer after `PATIENCE` updates in a row whose loss is NaN or infinite.

    A single such loss may be a step that a loss scaler skips. `step` is the first of the row, None
    as long as the run has not diverged.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._bad = 0
        self._since = 0

    @property
    def may_end(self) -> bool:
        """Whether the run ends with the next update, if the loss of that one is not finite too."""
        return self._bad == PATIENCE - 1

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Count the losses in a row that are not finite."""
        if math.isfinite(self._loss):
            self._bad = 0
            return
        if self._bad == 0:
            self._since = step
        self._bad += 1
        if self._bad >= PATIENCE:
            self.step = self._since
            trainer.should_stop = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Stop at once if the run is resumed from the last checkpoint of a diverged one."""
        if self.step is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return how many bad losses there have been in a row, and since which step."""
        return {"bad": self._bad, "since": self._since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a checkpoint."""
        self._bad, self._since = state_dict["bad"], state_dict["since"]
        self.step = self._since if self._bad >= PATIENCE else None
