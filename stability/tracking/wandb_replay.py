"""A run's metric log, sent to W&B as it arrived while the run trained.

Leaves out the run's summary and files (`wandb_publish`).
"""

from pathlib import Path

from stability.metrics.deviation import ULP_EDGES
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.events import read_events
from stability.records.metric_log import line_numbers, read_lines
from stability.records.names import WEIGHT_HISTOGRAM
from stability.tracking.alerts import emit, log_counts
from stability.tracking.wandb_logger import RowLogger

__all__ = ["replay"]


def replay(log: Path, logger: RowLogger) -> None:
    """Send every line of `log` that W&B does not have yet; none if there is no log.

    ValueError names the file and line that is damaged.
    """
    if not log.exists():
        return
    events = iter(read_events(log))
    for _, line in read_lines(log):
        if "event" in line:
            event = next(events)
            if logger.is_new:
                emit([logger], event)
            continue
        logger.log_metrics(line_numbers(line), step=line["step"])
        counts = {name: value for name, value in line.items() if isinstance(value, list)}
        edges = WEIGHT_EDGES if WEIGHT_HISTOGRAM in counts else ULP_EDGES
        log_counts([logger], counts, edges, line["step"])
