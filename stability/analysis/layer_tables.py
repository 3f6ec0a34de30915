"""Deviation by layer and step: the mean over an arm's seeds, thinned so that it can be shown.

Leaves out drawing (`report`) and every judgement (`locate`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stability.analysis.probe_records import natural
from stability.analysis.study_records import RecordedArm
from stability.records.metric_log import Column
from stability.records.metric_names import parse_deviation

__all__ = ["LayerTable", "layer_table", "mean_column", "thinned"]


@dataclass(frozen=True, slots=True)
class LayerTable:
    """A figure by layer (row) and step (column), NaN where a layer has none."""

    layers: tuple[str, ...]
    steps: NDArray[np.int64]
    """The step of each column; in a thinned table the first of its stretch."""
    values: NDArray[np.float64]
    at: NDArray[np.int64]
    """The step that each value is of."""

    @classmethod
    def of_columns(cls, columns: Mapping[str, Column]) -> "LayerTable":
        """Return the table of one column a layer, whose steps are sorted and each there once."""
        own = [column.steps for column in columns.values()]
        steps = own[0] if _are_equal(own) else reduce(np.union1d, own)
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
    """Return a deviation of whole layers, the mean over the seeds at the steps that all have.

    None if there is no such step. Of several shadows the first by name counts.
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
            for layer in sorted(layers, key=natural)
        }
    )
    return table if table.steps.size else None


def mean_column(seeds: Iterable[Column]) -> Column:
    """Return the mean at each step that all of `seeds` have; one that has no step does not count.

    Of several values of one step the last counts. Empty if nothing is shared.
    """
    columns = [column.last_of_each_step() for column in seeds if column.steps.size]
    if not columns:
        return Column(np.array([], np.int64), np.array([], np.float64))
    steps = _shared([column.steps for column in columns])
    total = np.zeros(len(steps))
    with np.errstate(over="ignore", invalid="ignore"):  # what diverged has no mean, and no warning
        for column in columns:
            total += column.values[np.searchsorted(column.steps, steps)]
    return Column(steps, total / len(columns))


def thinned(table: LayerTable, columns: int, *, ratio: bool = False) -> LayerTable:
    """Return `table` in at most `columns` columns, each the extreme of a stretch of steps.

    That is the finite value of largest magnitude, or of a `ratio` the one furthest from 1 in log;
    each keeps its own step in `at`, so no spike is lost or moved.
    """
    count = len(table.steps)
    if count <= columns:
        return table
    with np.errstate(divide="ignore", invalid="ignore"):
        reach = np.abs(np.log(table.values)) if ratio else np.abs(table.values)
    reach[~np.isfinite(reach)] = -1
    edges = np.linspace(0, count, columns + 1).astype(int)
    rows = np.arange(len(table.layers))
    best = np.stack(
        [start + reach[:, start:end].argmax(axis=1) for start, end in pairwise(edges)],
        axis=1,
    )
    at = rows[:, None], best
    return LayerTable(table.layers, table.steps[edges[:-1]], table.values[at], table.at[at])


def _shared(steps: Sequence[NDArray[np.int64]]) -> NDArray[np.int64]:
    return steps[0] if _are_equal(steps) else reduce(np.intersect1d, steps)


def _are_equal(steps: Sequence[NDArray[np.int64]]) -> bool:
    return all(each is steps[0] or np.array_equal(each, steps[0]) for each in steps)
