"""Events of a run, in words: findings of the probe, and alerts of the instability watch.

An event is a line of the metric log, `{"step": 3, "event": "alert", "layer": "layer_2", "text":
"..."}`, so that a resume cuts events and metrics at the same place. Any number may share a step.
Leaves out when something is worth an event: `probe` and `metrics.instability` say that.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from stability.records.metric_log import LogContent, MetricLog, read_log
from stability.records.metric_names import DRIFT_FROM

__all__ = [
    "GRADIENT_IN_PART",
    "Event",
    "EventKind",
    "event_of",
    "is_in_part",
    "log_event",
    "read_log_and_events",
]

EventKind = Literal["finding", "alert"]
"""A finding is a fact about an implementation; an alert is a metric past a threshold."""

GRADIENT_IN_PART = (
    "seen in part: it is taken through the model under the gradient that the script's own "
    "backward() left at what the model returned; that an error in what it returns changes that "
    "gradient too is left out"
)
"""The finding on a whole model's gradient whose loss the script computes outside of the model."""

_KEY = "event"
_KINDS = get_args(EventKind)


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened, measured on the weights after `step` updates.

    `layer` is "" if the whole run is meant. ValueError for an unknown kind, an empty text, or a
    negative step.
    """

    step: int
    kind: EventKind
    layer: str
    text: str

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise ValueError(
                f"Event: kind must be one of {', '.join(_KINDS)}, got {self.kind!r}; choose one"
            )
        if not self.text:
            raise ValueError("Event: text must say what happened, got ''; write a sentence")
        if self.step < 0:
            raise ValueError(f"Event: step must be >= 0, got {self.step}; count from 0")


def log_event(log: MetricLog, event: Event) -> None:
    """Append `event` to `log` as a line of its own; errors as `MetricLog.append`."""
    log.append(event.step, {}, event=event.kind, layer=event.layer, text=event.text)


def read_log_and_events(path: Path) -> tuple[LogContent, list[Event]]:
    """Return the content of a metric log and its events in order, read in one pass.

    What stands beside drifts is kept in the content, whose `kept` holds events too.

    ValueError names the file and the line of an event that is damaged.
    """
    content = read_log(path, keep=(_KEY, DRIFT_FROM))
    events = [(number, line) for number, line in content.kept if _KEY in line]
    return content, [event_of(line, f"{path}: line {number}") for number, line in events]


def is_in_part(text: str) -> bool:
    """Whether a finding says what was not seen of something that was."""
    return text.startswith("seen in part")


def event_of(line: Mapping[str, Any], where: str) -> Event:
    """Return the event of a line of a metric log. ValueError, which opens with `where`, if it is
    damaged.
    """
    for key in ("layer", "text"):
        if not isinstance(line.get(key), str):
            raise ValueError(f"{where}: an event's {key} must be a text, got {line.get(key)!r}")
    try:
        return Event(line["step"], line[_KEY], line["layer"], line["text"])
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error
