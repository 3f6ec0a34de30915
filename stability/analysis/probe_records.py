"""A probe's records, read once and put in order: figures by layer, head, range and step.

Leaves out every judgement (`locate`) and how it is shown (`report`).

What was measured inside the attention of one arm, or by one shadow of a probe, by name.

The probe's page and a study's report draw the same charts of it. Leaves out deviation by layer and
step, the largest part, which has its own way (`report.deviation_charts`).
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.records.events import Event, read_log_and_events
from stability.records.metric_log import Series
from stability.records.metric_names import COMPARED, DeviationName, deviation_name, parse_deviation
from stability.records.probe_record import METRICS_FILE, ProbeRecord, read_probe_record

__all__ = [
    "Observed",
    "Probed",
    "natural",
    "observed_arms",
    "observed_shadows",
    "read_probe",
    "shadow_label",
]


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """The figures of one arm and shadow; those of an arm are means over its seeds."""

    choice: Mapping[str, str]
    """What a reader chooses to see these, e.g. {"arm": "fp32"}."""
    shadow: str
    """As it stands in metric names; "" if there is one alone."""
    layers: tuple[str, ...]
    names: tuple[DeviationName, ...]
    watched: tuple[str, ...]
    """The figures that are watched in every layer."""
    series: Callable[[str], dict[int, float]]
    """Full metric name -> value by step; empty if it was never logged."""
    counts: Callable[[str], list[int]]
    """Full metric name -> histogram over all steps and seeds; empty if there is none."""

    @property
    def compared(self) -> list[str]:
        """The results that were compared, in the order of `COMPARED`."""
        found = {name.what for name in self.names}
        return [what for what in COMPARED if what in found]

    def parts(self, prefix: str) -> list[str]:
        """Return the parts of names that begin with `prefix` (`head`, `positions`), in order."""
        return sorted({n.part for n in self.names if n.part.startswith(prefix)}, key=natural)

    def worst(self, layer: str, what: str, metric: str, part: str = "") -> float | None:
        """Return a deviation's largest finite value over the steps, None if it has none."""
        name = deviation_name(layer, what, metric, shadow=self.shadow, part=part)
        finite = [value for value in self.series(name).values() if math.isfinite(value)]
        return max(finite, key=abs) if finite else None


def observed_shadows(probed: Probed) -> list[Observed]:
    """Return what each shadow of a probe found."""
    return [
        Observed(
            choice={"shadow": shadow_label(shadow)},
            shadow=shadow,
            layers=tuple(probed.layers),
            names=_deviations(probed.metrics, shadow),
            watched=_watched(probed.metrics),
            series=probed.by_step,
            counts=lambda name: _added(probed.counts.get(name, {})),
        )
        for shadow in probed.shadows
    ]


def observed_arms(study: RecordedStudy) -> list[Observed]:
    """Return what was found in each arm that was looked into; attention's arms come first."""
    arms = sorted(study.arms, key=lambda arm: arm.axis != "attention")
    return [observed for arm in arms for observed in _observed_arm(arm)]


def _observed_arm(arm: RecordedArm) -> list[Observed]:
    names = dict.fromkeys(name for run in arm.runs.values() for name in run.metrics)
    deviations = [parts for name in names if (parts := parse_deviation(name))]
    shadows = list(dict.fromkeys(parts.shadow for parts in deviations))
    return [
        Observed(
            choice={"arm": arm.name, **({"shadow": shadow} if len(shadows) > 1 else {})},
            shadow=shadow,
            layers=tuple(sorted({parts.layer for parts in deviations}, key=natural)),
            names=_deviations(names, shadow),
            watched=_watched(names),
            series=lambda name: _mean(arm, name),
            counts=lambda name: _pooled(arm, name),
        )
        for shadow in shadows
    ]


def _deviations(names: Mapping[str, object], shadow: str) -> tuple[DeviationName, ...]:
    found = (parse_deviation(name) for name in names)
    return tuple(parts for parts in found if parts and parts.shadow == shadow)


def _watched(names: Mapping[str, object]) -> tuple[str, ...]:
    parts = [name.split("/") for name in names if name.startswith("watch/")]
    return tuple(dict.fromkeys(each[2] for each in parts if len(each) == 3 and each[1] != "rms"))


def _mean(arm: RecordedArm, name: str) -> dict[int, float]:
    """Return the mean over the seeds at the steps that each of them has."""
    found = [values for run in arm.runs.values() if (values := run.series(name))]
    shared = set.intersection(*(set(values) for values in found)) if found else set()
    return {step: sum(values[step] for values in found) / len(found) for step in sorted(shared)}


def _pooled(arm: RecordedArm, name: str) -> list[int]:
    return _added({seed: _added(run.counts.get(name, {})) for seed, run in arm.runs.items()})


def _added(counts: Mapping[int, list[int]]) -> list[int]:
    """Return the bins of all histograms added up; those of an unusual length are left out."""
    lists = [bins for bins in counts.values() if bins]
    usual = Counter(map(len, lists)).most_common(1)
    alike = [bins for bins in lists if len(bins) == usual[0][0]]
    return [sum(bins) for bins in zip(*alike, strict=True)]
