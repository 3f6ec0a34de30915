"""A run's metric log, sent to W&B as it arrived while the run trained.

Leaves out the run's summary and files (`wandb_publish`).
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.metrics.ulp import ULP_EDGES
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.events import read_events
from stability.records.metric_log import read_lines
from stability.records.metric_names import WEIGHT_HISTOGRAM
from stability.records.sealed_json import NON_FINITE
from stability.tracking.alerts import emit, log_counts
from stability.tracking.wandb_logger import RowLogger

__all__ = ["numbers_of", "replay"]


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
        logger.log_metrics(numbers_of(line), step=line["step"])
        counts = {name: value for name, value in line.items() if isinstance(value, list)}
        edges = WEIGHT_EDGES if WEIGHT_HISTOGRAM in counts else ULP_EDGES
        log_counts([logger], counts, edges, line["step"])


def numbers_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of a line: no step, no counts and no text."""
    return {
        name: float(value)
        for name, value in line.items()
        if name != "step"
        and not isinstance(value, list)
        and (not isinstance(value, str) or value in NON_FINITE)
    }
