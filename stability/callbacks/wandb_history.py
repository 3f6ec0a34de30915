"""Sends W&B, when a run goes on, the history that it lacks: all of it offline, the rest online.

Leaves out the sending (`tracking.wandb_replay`) and a run that starts.
"""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from stability.tracking.wandb_logger import RowLogger
from stability.tracking.wandb_replay import replay

__all__ = ["WandbHistory"]


class WandbHistory(Callback):
    """Replay `log` to `logger` once the log has been cut to the checkpoint gone on from."""

    def __init__(self, log: Path, logger: RowLogger) -> None:
        self._log = log
        self._logger = logger

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replay, before any callback logs."""
        if trainer.global_step > 0:
            replay(self._log, self._logger)
