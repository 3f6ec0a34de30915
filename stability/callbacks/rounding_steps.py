"""Tells the attention of a training which update and micro-batch its stochastic rounding is of."""

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from stability.callbacks.each_update import UpdateCallback
from stability.data.datamodule import Share
from stability.probe.rounding_keys import EVALUATION, RoundingKeys

__all__ = ["RoundingSteps"]


class RoundingSteps(UpdateCallback):
    """Set `keys` before each micro-batch, and after each update for what is evaluated then.

    It stands before any callback that runs the model. `head_parts` is the number of ranks that
    share a layer's heads.
    """

    def __init__(self, keys: RoundingKeys, head_parts: int = 1) -> None:
        self._keys = keys
        self._keys.head_parts = head_parts
        self._micro_batch = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin where the training does, which a checkpoint decides."""
        self._keys.head_part = trainer.global_rank % self._keys.head_parts
        self._rest(trainer.global_step)

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Set the key of this micro-batch."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        share: Share = getattr(getattr(trainer, "datamodule", None), "share", None) or Share()
        call, part = divmod(self._micro_batch, share.held)
        self._keys.step, self._keys.call = trainer.global_step, call
        self._keys.first_batch = (share.first + part) * len(batch)
        self._micro_batch += 1

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Count from the first micro-batch."""
        self._micro_batch = 0

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Give what is evaluated between two updates a key of its own."""
        self._rest(trainer.global_step)

    def _rest(self, step: int) -> None:
        self._keys.step, self._keys.call, self._keys.first_batch = step, EVALUATION, 0
