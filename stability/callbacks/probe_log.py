"""A probe's readings to a run's loggers: figures, histograms, findings, and alerts.

Leaves out measuring (`attention.probe`) and how a logger writes (`tracking`).
"""

from collections.abc import Mapping, Sequence

from lightning.pytorch.loggers import Logger

from stability.metrics.instability import crossings
from stability.probe.measurements import Reading
from stability.records.events import Event
from stability.tracking.loggers import alert_event, emit, log_counts

__all__ = ["ProbeLog"]


class ProbeLog:
    """Writes readings, and remembers which thresholds are crossed already."""

    def __init__(self) -> None:
        self._watched: dict[str, float] = {}

    def write(self, loggers: Sequence[Logger], step: int, reading: Reading) -> None:
        """Log what was measured on the weights after `step` updates."""
        if reading.metrics:
            for logger in loggers:
                logger.log_metrics(reading.metrics, step=step)
        if reading.counts:
            log_counts(loggers, reading.counts, step)
        for layer, text in reading.findings:
            emit(loggers, Event(step, "finding", layer, text))
        watched = {
            name: value for name, value in reading.metrics.items() if name.startswith("watch/")
        }
        for crossing in crossings(watched, self._watched):
            emit(loggers, alert_event(crossing, step))
        self._watched |= watched

    def state_dict(self) -> dict[str, float]:
        """Return the last watched values."""
        return dict(self._watched)

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Go on from a checkpoint."""
        self._watched = dict(state)
