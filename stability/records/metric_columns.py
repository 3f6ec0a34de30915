"""The metrics of a log, in columns.

Lines that name the same metrics share their names and one table, so a million values take 8 MB, not
the 70 MB of Python's numbers in lists. Leaves out the log's lines and their checksums
(`metric_log`).
"""

from array import array
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from struct import pack

import numpy as np
from numpy.typing import NDArray

__all__ = ["Column", "MetricColumns", "Series", "column_of"]


@dataclass(slots=True)
class Series:
    """One metric: `values[i]` was logged at `steps[i]`, in the order of the log."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Column:
    """A `Series` as arrays that nobody writes to: steps in int64, values in FP64."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def last_of_each_step(self) -> "Column":
        """Return the steps sorted, each once, with the value that was logged last."""
        if np.all(self.steps[1:] > self.steps[:-1]):
            return self
        order = np.argsort(self.steps, kind="stable")
        steps = self.steps[order]
        last = np.append(steps[1:] != steps[:-1], True)
        return Column(steps[last], self.values[order][last])


class _Table:
    """Lines with the same names: a row a line, and where in the log the line stood."""

    def __init__(self) -> None:
        self.lines = array("q")
        self.steps = array("q")
        self.values = array("d")

    def column(self, place: int, width: int) -> tuple[NDArray[np.int64], Column]:
        """Return the numbers of the lines, and the column at `place` of a table of that width."""
        values = np.frombuffer(self.values).reshape(-1, width)[:, place]
        values.flags.writeable = False
        steps = np.frombuffer(self.steps, np.int64)
        steps.flags.writeable = False
        return np.frombuffer(self.lines, np.int64), Column(steps, values)


class MetricColumns(Mapping[str, Series]):
    """Every metric of a log by name, in the order in which the log first names them."""

    def __init__(self) -> None:
        self._tables: dict[tuple[str, ...], _Table] = {}
        self._places: dict[str, list[tuple[tuple[str, ...], int]]] = {}

    def add(self, line: int, step: int, names: tuple[str, ...], values: bytes) -> None:
        """Take in the metrics of a line, as FP64 in this machine's order.

        Lines come in the order of the log, all of them before any metric is asked for.
        """
        table = self._tables.get(names)
        if table is None:
            table = self._tables[names] = _Table()
            for place, name in enumerate(names):
                self._places.setdefault(name, []).append((names, place))
        table.lines.append(line)
        table.steps.append(step)
        table.values.frombytes(values)

    def column(self, name: str) -> Column:
        """Return a metric in the order of the log. KeyError if there is none of that name."""
        parts = [
            self._tables[names].column(place, len(names)) for names, place in self._places[name]
        ]
        if len(parts) == 1:
            return parts[0][1]
        order = np.argsort(np.concatenate([lines for lines, _ in parts]))
        return Column(
            np.concatenate([column.steps for _, column in parts])[order],
            np.concatenate([column.values for _, column in parts])[order],
        )

    def steps_of(self, prefix: str) -> dict[int, int]:
        """Return the step of each line, by its number, that has a metric whose name begins so."""
        return {
            line: step
            for names, table in self._tables.items()
            if any(name.startswith(prefix) for name in names)
            for line, step in zip(table.lines, table.steps, strict=True)
        }

    def less(
        self,
        prefix: str,
        dropped: Collection[int],
        instead: Mapping[int, Mapping[str, float]] | None = None,
    ) -> "MetricColumns":
        """Return the log without the metrics whose names begin so in the lines `dropped`.

        `instead` holds metrics by step, which stand where the last dropped line of their step
        stood; those of other steps are left out. What is not touched is shared with this one.
        """
        found, lines = MetricColumns(), []
        places = {step: n for n, step in sorted(self.steps_of(prefix).items()) if n in dropped}
        for names, table in self._tables.items():
            if not any(name.startswith(prefix) for name in names):
                found._share(names, table)
                continue
            others = [name for name in names if not name.startswith(prefix)]
            rows = np.frombuffer(table.values).reshape(-1, len(names))
            for line, step, row in zip(table.lines, table.steps, rows, strict=True):
                values = dict(zip(names, row, strict=True))
                if line in dropped:
                    values = {name: values[name] for name in others}
                    if places[step] == line:
                        values |= (instead or {}).get(step, {})
                lines.append((line, step, values))
        for line, step, values in sorted(lines, key=lambda entry: entry[0]):
            if values:
                found.add(line, step, tuple(values), pack(f"{len(values)}d", *values.values()))
        return found

    def _share(self, names: tuple[str, ...], table: _Table) -> None:
        self._tables[names] = table
        for place, name in enumerate(names):
            self._places.setdefault(name, []).append((names, place))

    def __getitem__(self, name: str) -> Series:
        column = self.column(name)
        return Series(column.steps.tolist(), column.values.tolist())

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def column_of(metrics: Mapping[str, Series], name: str) -> Column:
    """Return a metric as arrays, empty if there is none of that name."""
    if isinstance(metrics, MetricColumns) and name in metrics:
        return metrics.column(name)
    series = metrics.get(name, Series())
    return Column(np.array(series.steps, np.int64), np.array(series.values, np.float64))
