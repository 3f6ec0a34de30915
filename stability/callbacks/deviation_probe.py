"""Switches the attention probe on at due steps and logs what it saw.

A deviation at step s was measured in the forward pass on weights after s updates, like the loss
logged at s. Leaves out the comparison itself (`attention.dual`).
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from stability.attention.dual import AttentionProbe
from stability.attention.schedule import EveryN

__all__ = ["DeviationProbe"]


class DeviationProbe(Callback):
    """Log `deviation/<layer>/out/<metric>` at the steps that `schedule` names."""

    def __init__(self, probe: AttentionProbe, schedule: EveryN) -> None:
        self._probe = probe
        self._schedule = schedule
        self._step = 0

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Arm the probe for this forward pass."""
        self._step = trainer.global_step
        self._probe.active = self._schedule.is_due(self._step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Disarm it, once the step's last micro-batch is through, and log the deviations."""
        self._probe.active = False
        if trainer.global_step == self._step:
            return  # gradients are still being accumulated
        metrics = self._probe.collect()
        if metrics:
            for logger in trainer.loggers:
                logger.log_metrics(metrics, step=self._step)
