"""A run's deviations as arrays over looks, layers and heads, ready for statistics.

A log has one series for each layer, head, result and metric. Here the series of one result are put
side by side at their common looks, and turned into the samples that are judged: log error ratio,
gain, and signed error, each against its limit. Leaves out the statistics (`looks`) and what is said
of them (`locate`, `operator_evidence`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from stability.analysis.looks import OperatorLimits, Samples
from stability.records.metric_columns import Series
from stability.records.metric_names import DeviationName, is_made_here, parse_deviation

__all__ = ["JUDGED", "Judged", "PlaceTable", "joined", "place_tables", "samples_of"]

Array = NDArray[np.float64]

Judged = Literal["error", "gain", "bias"]
JUDGED: dict[Judged, str] = {"error": "error_ratio", "gain": "gain", "bias": "golden_bias_ulp"}
"""What an attention is judged by, and the metric behind it."""

_BASELINE = {"gain": "gain_baseline", "bias": "golden_bias_ulp_baseline"}
_UNIT = "baseline_over_rounding"
_WITHOUT_GOLDEN = ("rel_fro", "bias_ulp")
_READ = {*JUDGED.values(), *_BASELINE.values(), _UNIT, *_WITHOUT_GOLDEN}

_LEAST, _MOST = 1e-6, 1e30
"""Error ratios are read as at least and at most so much: the log of 0 would be no number."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlaceTable:
    """The metrics of one result of one shadow; NaN where a place was not looked at."""

    shadow: str
    what: str
    steps: NDArray[np.int64]
    """The step of each look; those of another run follow."""
    layers: tuple[str, ...]
    of_layer: Mapping[str, Array]
    """Metric -> `(looks, layers)`."""
    of_head: Mapping[str, Array]
    """Metric -> `(looks, layers, heads)`; empty where no heads were looked at."""


def place_tables(metrics: Mapping[str, Series]) -> list[PlaceTable]:
    """Return a table for each shadow and result in a run's metrics, in the order of the log."""
    found: dict[tuple[str, str], dict[DeviationName, Series]] = {}
    for name, series in metrics.items():
        parts = parse_deviation(name)
        if parts is None or parts.metric not in _READ or not is_made_here(parts.what):
            continue
        if not parts.part.startswith("positions") and series.steps:
            found.setdefault((parts.shadow, parts.what), {})[parts] = series
    return [_table(shadow, what, series) for (shadow, what), series in found.items()]


def _table(shadow: str, what: str, found: Mapping[DeviationName, Series]) -> PlaceTable:
    layers = tuple(dict.fromkeys(parts.layer for parts in found))
    steps = reduce(np.union1d, _distinct_steps(found.values())).astype(np.int64)
    heads = max((_head(parts) + 1 for parts in found), default=0)
    row = {layer: index for index, layer in enumerate(layers)}
    of_layer: dict[str, Array] = {}
    of_head: dict[str, Array] = {}
    for parts, series in found.items():
        # of two values at one step the last one is kept
        at = np.searchsorted(steps, series.steps)
        if not parts.part:
            table = of_layer.setdefault(parts.metric, np.full((len(steps), len(layers)), np.nan))
            table[at, row[parts.layer]] = series.values
        else:
            shape = (len(steps), len(layers), heads)
            table = of_head.setdefault(parts.metric, np.full(shape, np.nan))
            table[at, row[parts.layer], _head(parts)] = series.values
    return PlaceTable(
        shadow=shadow, what=what, steps=steps, layers=layers, of_layer=of_layer, of_head=of_head
    )


def _distinct_steps(series: Iterable[Series]) -> list[NDArray[np.int64]]:
    """Return each list of steps once: most series of a log have the same."""
    distinct = {tuple(each.steps) for each in series}
    return [np.array(sorted(steps), np.int64) for steps in distinct]


def _head(parts: DeviationName) -> int:
    return int(parts.part.removeprefix("head_")) if parts.part else -1


def joined(runs: Sequence[Sequence[PlaceTable]]) -> list[PlaceTable]:
    """Return the tables of several runs of one arm as one, their looks one after the other.

    A table whose layers or heads differ from those of the first run is left out.
    """
    groups: dict[tuple[str, str], list[PlaceTable]] = {}
    for table in (table for tables in runs for table in tables):
        alike = groups.setdefault((table.shadow, table.what), [])
        if not alike or _shape(alike[0]) == _shape(table):
            alike.append(table)
    return [tables[0] if len(tables) == 1 else _stacked(tables) for tables in groups.values()]


def _shape(table: PlaceTable) -> object:
    of_head = {name: values.shape[1:] for name, values in table.of_head.items()}
    return table.layers, set(table.of_layer), of_head


def _stacked(tables: Sequence[PlaceTable]) -> PlaceTable:
    first = tables[0]
    return PlaceTable(
        shadow=first.shadow,
        what=first.what,
        steps=np.concatenate([table.steps for table in tables]),
        layers=first.layers,
        of_layer={
            name: np.concatenate([table.of_layer[name] for table in tables])
            for name in first.of_layer
        },
        of_head={
            name: np.concatenate([table.of_head[name] for table in tables])
            for name in first.of_head
        },
    )


def samples_of(
    table: PlaceTable, judged: Judged, limits: OperatorLimits
) -> tuple[Samples, Samples | None] | None:
    """Return what is judged of layers and of heads; None if it was not measured."""
    if JUDGED[judged] not in table.of_layer:
        return None
    heads = None
    if JUDGED[judged] in table.of_head:
        heads = _samples(table.of_head, judged, limits)
    return _samples(table.of_layer, judged, limits), heads


def _samples(values: Mapping[str, Array], judged: Judged, limits: OperatorLimits) -> Samples:
    found = values[JUDGED[judged]]
    if judged == "error":
        return Samples(
            values=np.log(np.clip(found, _LEAST, _MOST)), limit=float(np.log(limits.error_ratio))
        )
    baseline = values.get(_BASELINE[judged])
    if judged == "gain":
        return Samples(values=found, baseline=baseline, limit=limits.gain, signed=True)
    # a bias matters beside the error that is there anyway: in FP32 that is many ULPs
    unit = np.fmax(values[_UNIT], 1.0) if _UNIT in values else np.ones_like(found)
    return Samples(
        values=found / unit,
        baseline=None if baseline is None else baseline / unit,
        limit=limits.bias_ulp,
        signed=True,
    )
