"""What the instrument has measured in the process of a training, on its way to the run's log."""

from collections.abc import Mapping, Sequence
from typing import Any

from stability.records.events import Event, log_event
from stability.records.metric_log import MetricLog

__all__ = ["read_probed", "write_probed"]


def read_probed(lines: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the looks among the lines of a rank's spool."""
    return [line for line in lines if line["kind"] == "probe"]


def write_probed(log: MetricLog, looks: Sequence[Mapping[str, Any]], steps: int) -> None:
    """Append the values, counts and events of each look up to `steps` updates."""
    for look in looks:
        step = look["step"]
        if step > steps:
            continue
        if look["metrics"] or look["counts"]:
            log.append(step, look["metrics"], look["counts"])
        for kind, layer, text in look["events"]:
            log_event(log, Event(step, kind, layer, text))
