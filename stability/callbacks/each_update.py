"""What a callback needs to work by updates, where gradients may be accumulated over micro-batches.

Leaves out everything that is done with them.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["UpdateCallback"]


class UpdateCallback(Callback):
    """Calls `before_update`, `after_batch` for each micro-batch, and `after_update`.

    `step` is the number of updates made before: the step that losses and gradients belong to.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget a fit that was broken off within an update."""
        self._step = -1

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Prepare for the first forward pass of an update."""

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Take in a micro-batch, and what the training step returned for it."""

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Act on the update: `trainer.global_step` counts it, the next checkpoint holds it."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Find out whether this micro-batch is the first of an update."""
        begins, self._step = trainer.global_step != self._step, trainer.global_step
        if begins:
            self.before_update(trainer, self._step)

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Find out whether this micro-batch was the last of its update."""
        self.after_batch(trainer, outputs, batch)
        if trainer.global_step != self._step:
            self.after_update(trainer, self._step)
