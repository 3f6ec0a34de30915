"""Stops a run whose loss is no number any more: a result, with the step at which it began.

One loss that is not finite may be a step that a loss scaler leaves out; `PATIENCE` in a row are
not. Leaves out what a divergence means.
"""

import math
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

__all__ = ["PATIENCE", "Divergence"]

PATIENCE = 5
"""Updates in a row with a loss that is not finite, before the run is stopped."""


class Divergence(Callback):
    """Stop the trainer after PATIENCE updates with a NaN or infinite loss; `step` says since when.

    `step` is None while there is none.
    """

    def __init__(self) -> None:
        self.step: int | None = None
        self._bad = 0
        self._since = 0

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Count the losses in a row that are not finite."""
        if math.isfinite(outputs["loss"].item()):
            self._bad = 0
            return
        if self._bad == 0:
            # the loss was computed on the weights before this update
            self._since = trainer.global_step - 1
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
