"""A probe's records, read once and put in order: figures by layer, head, range and step.

Leaves out every judgement (`locate`) and how it is shown (`report`).
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from stability.records.events import Event, read_log_and_events
from stability.records.metric_columns import Series
from stability.records.metric_names import COMPARED, deviation_name, parse_deviation
from stability.records.probe_record import METRICS_FILE, ProbeRecord, read_probe_record

__all__ = ["Probed", "natural", "read_probe", "shadow_label"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """What a probe has recorded."""

    record: ProbeRecord
    metrics: Mapping[str, Series]
    counts: Mapping[str, Mapping[int, list[int]]]
    """Histograms by name, then step."""
    events: tuple[Event, ...]

    @property
    def layers(self) -> list[str]:
        """The layers that have figures, in the order of the model's calls."""
        found = {parts.layer for name in self.metrics if (parts := parse_deviation(name))}
        known = [layer for layer in self.record.layers if layer in found]
        return known + sorted(found - set(known), key=natural)

    @property
    def shadows(self) -> list[str]:
        """The shadows as they stand in metric names: [""] if there is one alone."""
        found = {parts.shadow: None for name in self.metrics if (parts := parse_deviation(name))}
        return list(found)

    @property
    def compared(self) -> list[str]:
        """The results that were compared, in the order of `COMPARED`."""
        found = {parts.what for name in self.metrics if (parts := parse_deviation(name))}
        return [what for what in COMPARED if what in found]

    def steps(self) -> list[int]:
        """Return the steps that were looked at."""
        return sorted(
            {
                step
                for name, series in self.metrics.items()
                if name.startswith("deviation/")
                for step in series.steps
            }
        )

    def series(
        self, layer: str, what: str, metric: str, *, shadow: str = "", part: str = ""
    ) -> dict[int, float]:
        """Return a deviation by step; empty if it was never measured."""
        return self.by_step(deviation_name(layer, what, metric, shadow=shadow, part=part))

    def worst(
        self, layer: str, what: str, metric: str, *, shadow: str = "", part: str = ""
    ) -> float | None:
        """Return a deviation's largest finite value, None if it has none."""
        values = self.series(layer, what, metric, shadow=shadow, part=part).values()
        finite = [value for value in values if math.isfinite(value)]
        return max(finite, key=abs) if finite else None

    def by_step(self, name: str) -> dict[int, float]:
        """Return any metric by step; empty if it was never logged."""
        found = self.metrics.get(name)
        return dict(zip(found.steps, found.values, strict=True)) if found else {}

    def parts(self, prefix: str) -> list[str]:
        """Return the parts of names that begin with `prefix` (`head`, `positions`), in order."""
        found = {
            parts.part
            for name in self.metrics
            if (parts := parse_deviation(name)) and parts.part.startswith(prefix)
        }
        return sorted(found, key=natural)


def shadow_label(shadow: str) -> str:
    """Return what a shadow is called on a page: one that is alone has no name in its metrics."""
    return shadow or "the candidate"


def natural(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer_10 after layer_2."""
    parts = re.findall(r"\d+|\D+", name)
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def read_probe(folder: Path) -> Probed:
    """Read the probe in `folder`; ValueError names the file that is missing or damaged."""
    log = folder / METRICS_FILE
    record = read_probe_record(folder)
    if not log.is_file():
        raise ValueError(f"{log}: there are no figures here; the probe has looked at no step yet")
    content, events = read_log_and_events(log)
    return Probed(
        record=record, metrics=content.metrics, counts=content.counts, events=tuple(events)
    )
