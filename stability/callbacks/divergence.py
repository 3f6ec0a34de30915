"""Stops a run whose loss is no number any more: a result, with the step at which it began.

One loss that is not finite may be a step that a loss scaler leaves out; `PATIENCE` in a row are
not. Leaves out what a divergence means.
"""

import math
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from stability.callbacks.each_update import UpdateCallback

__all__ = ["PATIENCE", "Divergence"]

PATIENCE = 5
"""Updates in a row with a loss that is not finite, before the run is stopped."""


class Divergence(UpdateCallback):
    """Stop the trainer after PATIENCE updates with a NaN or infinite loss; `step` says since when.

    `step` is None while there is none. With gradient accumulation an update's loss is the mean over
    its micro-batches, as it is logged.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._bad = 0
        self._since = 0
        self._loss: Tensor | float = 0.0

    def before_update(self, trainer: Trainer, step: int) -> None:
        """Begin the update's loss."""
        self._loss = 0.0

    def after_batch(self, trainer: Trainer, outputs: Any, batch: Any) -> None:
        """Add up the update's loss: Lightning has divided each one by their number."""
        self._loss = self._loss + outputs["loss"].detach()

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
        """Stop at once if the checkpoint gone on from is the diverged run's last."""
        if self.step is not None:
            trainer.should_stop = True

    def state_dict(self) -> dict[str, Any]:
        """Return how many in a row there have been, and since which step."""
        return {"bad": self._bad, "since": self._since}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self._bad, self._since = state_dict["bad"], state_dict["since"]
        self.step = self._since if self._bad >= PATIENCE else None
