"""What is done with the weights after chosen numbers of updates: save, count, compare.

All of them read the weights and write none. Optimizer state and whatever else a resume needs are in
Lightning's checkpoint.
"""

from collections.abc import Callable, Collection

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from stability.callbacks.each_update import UpdateCallback
from stability.metrics.drift import drift
from stability.metrics.instability import count_nonfinite
from stability.metrics.weight_counts import weight_counts
from stability.records.metric_names import (
    DRIFT_FROM,
    DRIFT_OF,
    NONFINITE_WEIGHTS,
    WEIGHT_HISTOGRAM,
    drift_name,
)
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles, read_summed_snapshot
from stability.records.snapshots import write_snapshot
from stability.tracking.loggers import log_counts, log_drifts

__all__ = ["DriftProbe", "SnapshotWriter", "WeightCallback", "WeightHistogram"]


class WeightCallback(UpdateCallback):
    """Calls `at_step` with the weights of `model` after each number of updates in `steps`."""

    def __init__(self, model: nn.Module, steps: Collection[int]) -> None:
        self._model = model
        self._steps = frozenset(steps)

    def at_step(self, trainer: Trainer, step: int) -> None:
        """Act on the weights after `step` updates."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Act on the initial weights; a resumed run has done so."""
        if trainer.global_step == 0:
            self._act_if_due(trainer)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Act if this update completes a chosen step."""
        self._act_if_due(trainer)

    def _act_if_due(self, trainer: Trainer) -> None:
        if trainer.global_step in self._steps:
            self.at_step(trainer, trainer.global_step)


class SnapshotWriter(WeightCallback):
    """Write a snapshot of `model` as safetensors, and list it in `files`.

    A snapshot that is already listed stays: a resumed run has the same bits at that step.
    """

    def __init__(self, model: nn.Module, files: RunFiles, steps: Collection[int]) -> None:
        super().__init__(model, steps)
        self._files = files

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the weights it starts from: a kill may have hit between checkpoint and snapshot."""
        self._act_if_due(trainer)

    def at_step(self, trainer: Trainer, step: int) -> None:
        """Write the weights."""
        path = self._files.paths.snapshot(step)
        if path not in self._files:
            write_snapshot(path, self._model.state_dict())
            self._files.add(path)


class WeightHistogram(WeightCallback):
    """Count all weights of `model` by size, and those that are NaN or infinite."""

    def at_step(self, trainer: Trainer, step: int) -> None:
        """Log the counts."""
        weights = list(self._model.state_dict().values())
        log_counts(trainer.loggers, {WEIGHT_HISTOGRAM: weight_counts(weights)}, step)
        floating = [weight for weight in weights if weight.is_floating_point()]
        for logger in trainer.loggers:
            # the histogram has no bin for NaN, and one for infinity and all large numbers
            nonfinite = float(count_nonfinite(floating)) if floating else 0.0
            logger.log_metrics({NONFINITE_WEIGHTS: nonfinite}, step=step)


class DriftProbe(WeightCallback):
    """Log `drift/<parameter or all>/<metric>` of `model` from the run `baseline`.

    The baseline must have been trained first: its snapshots are read from disk. Beside the drifts
    stand the checksums of both snapshots, so the `SnapshotWriter` of `files` must come before.
    `check` is called with the step before and raises if the two runs are not a pair up to there.
    """

    def __init__(
        self,
        model: nn.Module,
        files: RunFiles,
        baseline: RunPaths,
        steps: Collection[int],
        check: Callable[[int], None],
    ) -> None:
        super().__init__(model, steps)
        self._files = files
        self._baseline = baseline
        self._check = check

    def at_step(self, trainer: Trainer, step: int) -> None:
        """Log the drift."""
        self._check(step)
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        from_weights, from_sum = read_summed_snapshot(self._baseline, step)
        distances = drift(weights, from_weights)
        metrics = {
            drift_name(parameter, metric): value
            for parameter, values in distances.items()
            for metric, value in values.items()
        }
        own_sum = self._files.checksum(self._files.paths.snapshot(step))
        parents = {DRIFT_OF: own_sum, DRIFT_FROM: from_sum}
        log_drifts(trainer.loggers, metrics, step, parents)
