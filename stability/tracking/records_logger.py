"""Lightning's metrics, and a run's events and counts, into its metric log.

Leaves out hyperparameters, which are in the manifest.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers.logger import Logger

from stability.records.events import Event, log_event
from stability.records.metric_log import MetricLog

__all__ = ["RecordsLogger"]


class RecordsLogger(Logger):
    """Writes each `log_metrics` call as a line of `log`; Lightning's "epoch" is left out."""

    def __init__(self, log: MetricLog) -> None:
        super().__init__()
        self._log = log

    @property
    def name(self) -> str:
        """Return what Lightning calls this logger."""
        return "records"

    @property
    def version(self) -> None:
        """Return None: the run's folder is all the version there is."""
        return

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Append `metrics` at `step`. ValueError without a step: a record needs one."""
        if step is None:
            raise ValueError("RecordsLogger.log_metrics: step must be given, got None")
        kept = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if kept:
            self._log.append(step, kept)

    def log_event(self, event: Event) -> None:
        """Append `event`, at its own step."""
        log_event(self._log, event)

    def log_counts(self, counts: Mapping[str, Sequence[int]], step: int) -> None:
        """Append the counts of histograms at `step`."""
        self._log.append(step, {}, counts)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest holds the config."""
