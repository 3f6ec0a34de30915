"""Counts the weights by size at the snapshot steps, for the records and for W&B.

Leaves out the counting (`metrics.weight_counts`) and the weights themselves (`snapshot_writer`).
"""

from collections.abc import Collection
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from stability.metrics.weight_counts import weight_counts
from stability.records.metric_names import WEIGHT_HISTOGRAM
from stability.tracking.loggers import log_counts

__all__ = ["WeightHistogram"]


class WeightHistogram(Callback):
    """Log the counts of all of `model`'s weights after each number of updates in `steps`."""

    def __init__(self, model: nn.Module, steps: Collection[int]) -> None:
        self._model = model
        self._steps = frozenset(steps)
        self._last = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the initial weights, unless a resume has them counted already."""
        if trainer.global_step == 0:
            self._count(trainer)
        self._last = trainer.global_step

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count if this update completes a chosen step."""
        if trainer.global_step > self._last:
            self._count(trainer)

    def _count(self, trainer: Trainer) -> None:
        step = self._last = trainer.global_step
        if step in self._steps:
            counts = weight_counts(self._model.state_dict().values())
            log_counts(trainer.loggers, {WEIGHT_HISTOGRAM: counts}, step)
