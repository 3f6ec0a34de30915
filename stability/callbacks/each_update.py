"""Base of callbacks that act once an update, also where gradients are accumulated.

Lightning calls its hooks once a micro-batch; an update may take several of them.
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["UpdateCallback"]


class UpdateCallback(Callback):
    """Calls `before_update`, `after_batch` for each micro-batch, and `after_update`.

    `step` is the number of updates made before: the step that losses and gradients belong to.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget a fit that was interrupted within an update."""
        self._step = -1

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Prepare for the first forward pass of an update."""

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Receive a micro-batch, and what the training step returned for it."""

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Act on the update: `trainer.global_step` counts it, the next checkpoint holds it."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Call `before_update` if this micro-batch is the first of an update."""
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
        """Call `after_batch`, and `after_update` if this micro-batch was the last of its update."""
        self.after_batch(trainer, outputs, batch)
        if trainer.global_step != self._step:
            self.after_update(trainer, self._step)
