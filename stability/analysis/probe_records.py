"""What was measured inside the attention: by a probe, or in the arms of a study.

`RecordedProbe` is a whole probe as it was written. `ShadowMetrics` holds the metrics of one shadow,
from a probe or from a study, so that a probe's page and a study's report draw the same charts.
`LayerTable` is one deviation by layer and step; it is the largest part and is thinned for display.
Every judgement is left to `locate`.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.records.events import Event, read_log_and_events
from stability.records.metric_columns import Column, Series
from stability.records.metric_names import (
    DeviationName,
    at_rank,
    deviation_name,
    in_order,
    of_rank,
    parse_deviation,
    without_batch,
)
from stability.records.probe_record import (
    METRICS_FILE,
    PROBE_FILE,
    ProbeRecord,
    check_probe_log,
    rank_folder,
    read_probe_record,
)

__all__ = [
    "LayerTable",
    "RecordedProbe",
    "ShadowMetrics",
    "layer_table",
    "mean_column",
    "metrics_of_probe",
    "metrics_of_study",
    "natural_order",
    "read_probe",
    "shadow_label",
    "thinned",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedProbe:
    """All that a probe has recorded."""

    record: ProbeRecord
    metrics: Mapping[str, Series]
    counts: Mapping[str, Mapping[int, list[int]]]
    """Histograms by name, then step."""
    events: tuple[Event, ...]
    missing_ranks: int = 0
    """How many ranks there are of which nothing is on record."""

    @property
    def layers(self) -> list[str]:
        """The layers that have metrics, in the order of the model's calls."""
        found = {parts.layer for name in self.metrics if (parts := parse_deviation(name))}
        at = {layer: place for place, layer in enumerate(self.record.layers)}

        def order(layer: str) -> tuple[int, list[tuple[bool, int, str]]]:
            # those of later micro-batches where the layer is
            return at.get(without_batch(layer), len(at)), natural_order(layer)

        return sorted(found, key=order)

    @property
    def shadows(self) -> list[str]:
        """The shadows as they stand in metric names: [""] if there is one alone."""
        found = {parts.shadow: None for name in self.metrics if (parts := parse_deviation(name))}
        return list(found)

    @property
    def compared(self) -> list[str]:
        """The results that were compared, those of an attention first."""
        return in_order(parts.what for name in self.metrics if (parts := parse_deviation(name)))

    @property
    def open_end(self) -> str:
        """Why there may be figures that are not read here; empty if the probe has ended."""
        if self.missing_ranks:
            return f"nothing is on record of {self.missing_ranks} of {self.record.ranks} ranks"
        if self.record.state == "ended":
            return ""
        looks = len(self.steps())
        on_record = f"{looks} step{'s are' if looks != 1 else ' is'} on record"
        if self.record.state == "running":
            return f"unfinished: its writer did not end, or runs still; {on_record}"
        return f"nothing seals the end of an older version's log; {on_record}"

    @property
    def is_counted(self) -> bool:
        """Whether it is on record how many steps there were; a probe writes that when it ends."""
        return self.record.state != "running" and self.record.steps > 0

    @property
    def looked_at(self) -> str:
        """How many steps were looked at, and of how many, if the probe has ended."""
        looks = len(self.steps())
        of = f" of {self.record.steps}" if self.is_counted else ""
        return f"{looks}{of} step{'s' if looks != 1 or of else ''}"

    def layers_of(self, shadow: str) -> list[str]:
        """Return the layers that one shadow was compared in."""
        parts = (parse_deviation(name) for name in self.metrics)
        found = {each.layer for each in parts if each and each.shadow == shadow}
        return [layer for layer in self.layers if layer in found]

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

    def by_step(self, name: str) -> dict[int, float]:
        """Return any metric by step; empty if it was never logged."""
        found = self.metrics.get(name)
        return dict(zip(found.steps, found.values, strict=True)) if found else {}


def shadow_label(shadow: str) -> str:
    """Return what a shadow is called on a page: one that is alone has no name in its metrics."""
    return shadow or "the candidate"


def natural_order(name: str) -> list[tuple[bool, int, str]]:
    """Return a sort key that puts layer_10 after layer_2."""
    parts = re.findall(r"\d+|\D+", name)
    # the flag comes first, so that a number is never compared with a word
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in parts]


def read_probe(folder: Path) -> RecordedProbe:
    """Read the probe in `folder`; ValueError names the file that is missing or damaged.

    Where several ranks have trained the model their layers are told apart: `layer@rank1`.
    """
    first = _read_rank(folder)
    if first.record.ranks <= 1:
        return first
    ranks = {0: first, **_other_ranks(folder, first.record.ranks)}
    states = {one.record.state for one in ranks.values()}
    return RecordedProbe(
        record=replace(
            first.record,
            layers=[
                at_rank(layer, rank) for rank, one in ranks.items() for layer in one.record.layers
            ],
            state="ended" if states == {"ended"} else "running",
            steps=min(one.record.steps for one in ranks.values()),
        ),
        metrics={
            of_rank(name, rank): one.metrics[name]
            for rank, one in ranks.items()
            for name in one.metrics
        },
        counts={
            of_rank(name, rank): counts
            for rank, one in ranks.items()
            for name, counts in one.counts.items()
        },
        events=tuple(
            replace(event, layer=at_rank(event.layer, rank))
            for rank, one in ranks.items()
            for event in one.events
        ),
        missing_ranks=first.record.ranks - len(ranks),
    )


def _other_ranks(folder: Path, ranks: int) -> dict[int, RecordedProbe]:
    found = {}
    # by what is there, and not by a number that stands in a file
    for place in sorted(folder.glob("rank-*"), key=lambda path: natural_order(path.name)):
        one = _read_rank(place)
        if rank_folder(folder, one.record.rank) != place or one.record.ranks != ranks:
            raise ValueError(
                f"{place / PROBE_FILE}: must be of rank {place.name.removeprefix('rank-')} of "
                f"{ranks}, is of rank {one.record.rank} of {one.record.ranks}"
            )
        found[one.record.rank] = one
    return found


def _read_rank(folder: Path) -> RecordedProbe:
    log = folder / METRICS_FILE
    record = read_probe_record(folder)
    check_probe_log(folder, record)
    if not log.is_file():
        raise ValueError(f"{log}: there are no figures here; the probe has looked at no step yet")
    content, events = read_log_and_events(log)
    return RecordedProbe(
        record=record, metrics=content.metrics, counts=content.counts, events=tuple(events)
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ShadowMetrics:
    """The metrics of one shadow, of a probe or of one arm; those of an arm are means over seeds."""

    choice: Mapping[str, str]
    """What tells it from the others of one page, e.g. {"arm": "fp32"}."""
    shadow: str
    """Its part of the metric names; "" if there is one alone."""
    layers: tuple[str, ...]
    names: tuple[DeviationName, ...]
    watched: tuple[str, ...]
    """Names of what is watched in every layer."""
    series: Callable[[str], dict[int, float]]
    """Full metric name -> value by step; empty if it was never logged."""
    counts: Callable[[str], list[int]]
    """Full metric name -> histogram over all steps and seeds; empty if there is none."""

    @property
    def compared(self) -> list[str]:
        """The results that were compared: the one of the largest error ratio, then in order."""
        ordered = in_order(name.what for name in self.names)
        ratios = {what: self._largest_ratio(what) for what in ordered}
        if not any(ratios.values()):
            return ordered
        worst = max(ordered, key=lambda what: ratios[what])
        return [worst, *(what for what in ordered if what != worst)]

    def _largest_ratio(self, what: str) -> float:
        return max(
            (self.worst(layer, what, "error_ratio") or 0.0 for layer in self.layers), default=0.0
        )

    def parts(self, prefix: str) -> list[str]:
        """Return the parts of names that begin with `prefix` (`head`, `positions`), in order."""
        return sorted({n.part for n in self.names if n.part.startswith(prefix)}, key=natural_order)

    def worst(self, layer: str, what: str, metric: str, part: str = "") -> float | None:
        """Return a deviation's largest finite value over the steps, None if it has none."""
        name = deviation_name(layer, what, metric, shadow=self.shadow, part=part)
        # max() keeps or drops a NaN by its place; an infinite value, where the reference is zero,
        # would hide all others
        finite = [value for value in self.series(name).values() if math.isfinite(value)]
        # by magnitude, sign kept: a bias may be negative
        return max(finite, key=abs) if finite else None


def metrics_of_probe(probed: RecordedProbe) -> list[ShadowMetrics]:
    """Return the metrics of each shadow of a probe."""
    return [
        ShadowMetrics(
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


def metrics_of_study(study: RecordedStudy) -> list[ShadowMetrics]:
    """Return the metrics of each arm that was probed; arms that change the attention come first."""
    # the sort is stable, so both groups stay in the study's order
    arms = sorted(study.arms, key=lambda arm: arm.axis != "attention")
    return [metrics for arm in arms for metrics in _metrics_of_arm(arm)]


def _metrics_of_arm(arm: RecordedArm) -> list[ShadowMetrics]:
    names = dict.fromkeys(name for run in arm.runs.values() for name in run.metrics)
    deviations = [parts for name in names if (parts := parse_deviation(name))]
    shadows = list(dict.fromkeys(parts.shadow for parts in deviations))
    return [
        ShadowMetrics(
            choice={"arm": arm.name, **({"shadow": shadow} if len(shadows) > 1 else {})},
            shadow=shadow,
            layers=tuple(sorted({parts.layer for parts in deviations}, key=natural_order)),
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
    # at any other step the mean would be over other seeds, and jump where one of them stops
    shared = set.intersection(*(set(values) for values in found)) if found else set()
    return {step: sum(values[step] for values in found) / len(found) for step in sorted(shared)}


def _pooled(arm: RecordedArm, name: str) -> list[int]:
    return _added({seed: _added(run.counts.get(name, {})) for seed, run in arm.runs.items()})


def _added(counts: Mapping[int, list[int]]) -> list[int]:
    """Return the sum of all histograms, bin by bin; those of an unusual length are left out."""
    lists = [bins for bins in counts.values() if bins]
    # another number of bins means other edges: added by index, unlike sizes would be mixed
    usual = Counter(map(len, lists)).most_common(1)
    alike = [bins for bins in lists if len(bins) == usual[0][0]]
    return [sum(bins) for bins in zip(*alike, strict=True)]


@dataclass(frozen=True, slots=True)
class LayerTable:
    """One metric by layer (row) and step (column), NaN where a layer has none."""

    layers: tuple[str, ...]
    steps: NDArray[np.int64]
    """The step of each column; in a thinned table the first step of its stretch."""
    values: NDArray[np.float64]
    at: NDArray[np.int64]
    """The step at which each value was measured."""

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> "LayerTable":
        """Return the table of one column per layer, each with sorted and unique steps."""
        own = [column.steps for column in columns.values()]
        steps = own[0] if _are_equal(own) else reduce(np.union1d, own)
        # NaN, not 0: a layer that was not looked at has no deviation of zero
        values = np.full((len(columns), len(steps)), np.nan)
        for row, column in zip(values, columns.values(), strict=True):
            row[np.searchsorted(steps, column.steps)] = column.values
        return cls(tuple(columns), steps, values, np.broadcast_to(steps, values.shape))

    @classmethod
    def of_steps(cls, by_layer: Mapping[str, Mapping[int, float]]) -> "LayerTable":
        """Return the table of layer -> step -> value."""
        columns = {
            layer: Column(
                np.array(list(values), np.int64), np.array(list(values.values()), np.float64)
            ).last_of_each_step()
            for layer, values in by_layer.items()
        }
        return cls.of_columns(columns)


def layer_table(arm: RecordedArm, what: str, metric: str) -> LayerTable | None:
    """Return a deviation of whole layers: the mean over the seeds, at the steps that all have.

    None if there is no such step. Of several shadows the first by name is taken.
    """
    ending = f"/{what}/{metric}"
    names = {name for run in arm.runs.values() for name in run.metrics if name.endswith(ending)}
    found = {name: parts for name in names if (parts := parse_deviation(name)) and not parts.part}
    first = min((parts.shadow for parts in found.values()), default="")
    layers = {parts.layer: name for name, parts in found.items() if parts.shadow == first}
    if not layers:
        return None
    table = LayerTable.of_columns(
        {
            layer: mean_column(run.column(layers[layer]) for run in arm.runs.values())
            for layer in sorted(layers, key=natural_order)
        }
    )
    return table if table.steps.size else None


def mean_column(seeds: Iterable[Column]) -> Column:
    """Return the mean at each step that all of `seeds` have; a seed without any step is left out.

    Of several values at one step the last is taken. Empty if no step is shared.
    """
    columns = [column.last_of_each_step() for column in seeds if column.steps.size]
    if not columns:
        return Column(np.array([], np.int64), np.array([], np.float64))
    steps = _shared([column.steps for column in columns])
    total = np.zeros(len(steps))
    with np.errstate(over="ignore", invalid="ignore"):  # a diverged run may overflow
        for column in columns:
            total += column.values[np.searchsorted(column.steps, steps)]
    return Column(steps, total / len(columns))


def thinned(table: LayerTable, columns: int, *, ratio: bool = False) -> LayerTable:
    """Return `table` in at most `columns` columns, each the extreme of a stretch of steps.

    The extreme is the finite value of largest magnitude, or for a `ratio` the one whose log is
    furthest from 0. Each value keeps its own step in `at`, so no spike is lost or moved.
    """
    count = len(table.steps)
    if count <= columns:
        return table
    with np.errstate(divide="ignore", invalid="ignore"):
        size = np.abs(np.log(table.values)) if ratio else np.abs(table.values)
    # argmax takes the first NaN it meets; below every magnitude, such a value is taken only where
    # a stretch of steps has no other
    size[~np.isfinite(size)] = -1
    # count > columns makes each stretch longer than 1, so none is empty once cut to integers
    edges = np.linspace(0, count, columns + 1).astype(int)
    rows = np.arange(len(table.layers))
    best = np.stack(
        [start + size[:, start:end].argmax(axis=1) for start, end in pairwise(edges)],
        axis=1,
    )
    at = rows[:, None], best
    return LayerTable(table.layers, table.steps[edges[:-1]], table.values[at], table.at[at])


def _shared(steps: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return steps[0] if _are_equal(steps) else reduce(np.intersect1d, steps)


def _are_equal(steps: Sequence[NDArray[np.int64]]) -> bool:
    return all(each is steps[0] or np.array_equal(each, steps[0]) for each in steps)
