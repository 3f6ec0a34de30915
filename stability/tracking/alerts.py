"""Events and counts to a run's loggers: each kind of logger gets them in its own form.

Our records take everything; W&B gets an event of kind alert as an alert, by mail or chat if its
user wants that, and counts as a histogram. Any other logger is passed over. Leaves out numbers,
which every logger takes by itself.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta

import numpy as np
import wandb
from lightning.pytorch.loggers import Logger, WandbLogger

from stability.metrics.instability import Crossing
from stability.records.events import Event
from stability.records.metric_names import STEP_AXIS
from stability.tracking.records_logger import RecordsLogger
from stability.tracking.wandb_logger import RowLogger

__all__ = ["alert_event", "emit", "log_counts"]

_TITLE_LENGTH = 63
_WAIT = timedelta(milliseconds=1)  # W&B 0.31 takes 0 for its default, a minute without alerts


def alert_event(crossing: Crossing, step: int) -> Event:
    """Return the event that says that `crossing` happened on the weights after `step` updates."""
    return Event(step, "alert", crossing.layer, crossing.text)


def emit(loggers: Iterable[Logger], event: Event) -> None:
    """Write `event` to the records, and send it as a W&B alert if it is of that kind."""
    for logger in loggers:
        if isinstance(logger, RecordsLogger):
            logger.log_event(event)
        elif isinstance(logger, WandbLogger) and event.kind == "alert":
            where = f" at step {event.step}"
            title = (event.layer or "run")[: _TITLE_LENGTH - len(where)] + where
            logger.experiment.alert(title, event.text, level="WARN", wait_duration=_WAIT)


def log_counts(
    loggers: Iterable[Logger],
    counts: Mapping[str, Sequence[int]],
    edges: Sequence[float],
    step: int,
) -> None:
    """Write `counts` to the records, and to W&B as histograms.

    `edges` are the finite, growing bounds between the bins, one fewer than the bins: the first and
    last bin are open, and W&B draws them as wide as their neighbours. Without counts nothing is
    written. ValueError for any other number of edges, fewer than two, and as `MetricLog.append`.
    """
    wrong = [name for name, values in counts.items() if len(values) != len(edges) + 1]
    if wrong or len(edges) < 2:
        bins = len(counts[wrong[0]]) if wrong else len(edges) + 1
        raise ValueError(
            f"log_counts: edges must be at least 2 and one fewer than the {bins} bins of "
            f"{wrong[0] if wrong else 'each metric'}, got {len(edges)}; pass the inner bounds"
        )
    for logger in loggers if counts else ():
        if isinstance(logger, RecordsLogger):
            logger.log_counts(counts, step)
        elif isinstance(logger, WandbLogger):
            drawn = _closed(edges)
            histograms = {
                name: wandb.Histogram(np_histogram=(np.asarray(values), np.asarray(drawn)))
                for name, values in counts.items()
            }
            if isinstance(logger, RowLogger):
                logger.log_row(histograms, step)
            else:
                logger.experiment.log({**histograms, STEP_AXIS: step})


def _closed(edges: Sequence[float]) -> list[float]:
    first, last = 2 * edges[0] - edges[1], 2 * edges[-1] - edges[-2]
    return [first, *edges, last]
