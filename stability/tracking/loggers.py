"""Writes a run's numbers, events and counts to the loggers of a Lightning trainer.

Our own logger is `RecordsLogger`, which writes the metric log; the log itself mirrors its lines to
W&B (`history.MirroredLog`). A user who brings a trainer may bring Lightning's `WandbLogger`: it
gets alerts and histograms in W&B's form. Any other logger gets the numbers only, from Lightning.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from lightning.pytorch.loggers import Logger, WandbLogger

from stability.metrics.instability import Crossing
from stability.records.events import Event, log_event
from stability.records.metric_log import MetricLog
from stability.records.metric_names import STEP_AXIS
from stability.tracking.history import check_counts, row_of, send_alert

__all__ = ["RecordsLogger", "alert_event", "emit", "log_counts"]


class RecordsLogger(Logger):
    """Writes each `log_metrics` call as a line of `log`, less the "epoch" that Lightning adds."""

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
        """Append `metrics` at `step`. Raises ValueError without a step: a record needs one."""
        if step is None:
            raise ValueError("RecordsLogger.log_metrics: step must be given, got None")
        numbers = {name: float(value) for name, value in metrics.items() if name != "epoch"}
        if numbers:
            self._log.append(step, numbers)

    def log_event(self, event: Event) -> None:
        """Append `event` at its own step."""
        log_event(self._log, event)

    def log_counts(self, counts: Mapping[str, Sequence[int]], step: int) -> None:
        """Append the counts of histograms at `step`."""
        self._log.append(step, {}, counts)

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing: the manifest holds the config."""


def alert_event(crossing: Crossing, step: int) -> Event:
    """Return the event that says that `crossing` happened on the weights after `step` updates."""
    return Event(step, "alert", crossing.layer, crossing.text)


def emit(loggers: Iterable[Logger], event: Event) -> None:
    """Write `event` to the records; send it to a user's W&B if it is of kind alert."""
    for logger in loggers:
        if isinstance(logger, RecordsLogger):
            logger.log_event(event)
        elif isinstance(logger, WandbLogger):
            send_alert(logger.experiment, event)


def log_counts(loggers: Iterable[Logger], counts: Mapping[str, Sequence[int]], step: int) -> None:
    """Write the counts of histograms to the records, and to a user's W&B as histograms.

    Without counts nothing is written. Raises ValueError as `check_counts` and `MetricLog.append`.
    """
    check_counts(counts)
    for logger in loggers if counts else ():
        if isinstance(logger, RecordsLogger):
            logger.log_counts(counts, step)
        elif isinstance(logger, WandbLogger):
            line = {name: list(values) for name, values in counts.items()}
            logger.experiment.log({**row_of(line), STEP_AXIS: step})
