"""Logs the drift of this arm from its baseline while it trains, at every step both have on disk.

Reads the baseline's snapshots, so the baseline must have been trained first. Leaves out the
arithmetic (`metrics.drift`) and the writing of snapshots.
"""

from collections.abc import Callable, Collection

from lightning.pytorch import LightningModule, Trainer
from torch import nn

from stability.callbacks.each_update import UpdateCallback
from stability.metrics.drift import drift
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot

__all__ = ["DriftProbe"]


class DriftProbe(UpdateCallback):
    """Log `drift/<parameter or all>/<metric>` against `baseline` after each of `steps`.

    `check` is called with the step first: it raises if the two runs are not a pair up to there.
    """

    def __init__(
        self,
        model: nn.Module,
        baseline: RunPaths,
        steps: Collection[int],
        check: Callable[[int], None],
    ) -> None:
        self._model = model
        self._baseline = baseline
        self._steps = frozenset(steps)
        self._check = check

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compare the initial weights, unless a resume has them compared already."""
        if trainer.global_step == 0:
            self._compare(trainer)

    def after_update(self, trainer: Trainer, step: int) -> None:
        """Compare if this update completes a chosen step."""
        self._compare(trainer)

    def _compare(self, trainer: Trainer) -> None:
        step = trainer.global_step
        if step not in self._steps:
            return
        self._check(step)
        weights = {name: value.detach().cpu() for name, value in self._model.state_dict().items()}
        distances = drift(weights, read_run_snapshot(self._baseline, step))
        metrics = {
            drift_name(parameter, metric): value
            for parameter, values in distances.items()
            for metric, value in values.items()
        }
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=step)
