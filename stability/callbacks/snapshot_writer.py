"""Writes the weights at chosen steps as safetensors.

Leaves out optimizer state and everything else that a resume needs: that is Lightning's checkpoint.
"""

from collections.abc import Collection

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from stability.callbacks.each_update import UpdateCallback
from stability.records.run_files import RunFiles
from stability.records.snapshots import write_snapshot

__all__ = ["SnapshotWriter"]


class SnapshotWriter(UpdateCallback):
    """Write a snapshot of `model` after each number of updates in `steps`, and list it in `files`.

    One that is listed already stays: a run that goes on has the same bits there.
    """

    def __init__(self, model: nn.Module, files: RunFiles, steps: Collection[int]) -> None:
        self._model = model
        self._files = files
        self._steps = frozenset(steps)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the initial weights."""
        self._write(trainer.global_step)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Write the weights if this update completes a chosen step."""
        self._write(trainer.global_step)

    def _write(self, step: int) -> None:
        path = self._files.paths.snapshot(step)
        if step in self._steps and path not in self._files:
            write_snapshot(path, self._model.state_dict())
            self._files.add(path)
