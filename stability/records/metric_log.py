"""The metric log of a run: JSON lines, one per logged step and source, flushed as they are written.

A line is `{"step": 3, "train/loss": 1.25, "crc": "5f1c60c2"}`; several lines may share a step. JSON
has no NaN and no infinity, so they stand as the strings "nan", "inf" and "-inf"; any other string
is a text entry, not a metric, and neither is a list, which holds the counts of a histogram. A line
is one `write` and ends in a newline: a process killed while writing leaves at most a torn last
line, which readers ignore and the next writer cuts off. `crc` is the CRC-32 of what stands before
it, so that a flipped bit is found. Leaves out what the names mean (`names`), and power cuts: lines
are not forced to disk.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

from stability.records.atomic import DiskFullError

__all__ = ["MetricLog", "Series", "read_counts", "read_lines", "read_metrics", "read_text"]

_STEP = "step"
_CRC = "crc"
_NON_FINITE = {"nan", "inf", "-inf"}


@dataclass(slots=True)
class Series:
    """One metric: `values[i]` was logged at `steps[i]`, in the order of the log."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)


class MetricLog:
    """Appends to one run's log. Opens at the first line, so that making one writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None

    def append(
        self,
        step: int,
        metrics: Mapping[str, float],
        counts: Mapping[str, Sequence[int]] | None = None,
        **text: str,
    ) -> None:
        """Write one line for `step`: numbers and counts by metric name, text entries by keyword.

        Counts are one or more whole numbers >= 0. ValueError for others, for a name that is given
        twice or is "step" or "crc", or a text that would be read back as a number; DiskFullError if
        the disk takes no more; the line is lost, the log is not.
        """
        lists = {name: list(values) for name, values in (counts or {}).items()}
        _check_names(metrics, lists, text)
        _check_counts(lists)
        numbers = {name: _to_json(float(x)) for name, x in metrics.items()}
        line = {_STEP: step, **numbers, **lists, **text}
        encoded = _sealed(json.dumps(line, allow_nan=False).encode())
        if self._file is None:
            self._file = self._open()
        written = self._file.write(encoded)
        if written != len(encoded):
            self.close()  # the next append cuts off what was written
            raise DiskFullError(
                f"{self._path}: the disk is full, wrote {written} of {len(encoded)} bytes"
            )

    def position(self) -> int:
        """Return the length of the log in bytes: whole lines only."""
        if self._file is not None:
            return self._file.tell()
        return self._path.read_bytes().rfind(b"\n") + 1 if self._path.exists() else 0

    def truncate_to(self, position: int) -> None:
        """Cut the log to `position` bytes, as `position()` once gave them.

        ValueError if the log is shorter: it has lost lines that a checkpoint counts on.
        """
        length = self.position()
        if length < position:
            raise ValueError(
                f"{self._path}: must be at least {position} bytes long to go on from the "
                f"checkpoint, is {length}; remove the run's folder to start it anew"
            )
        self.close()
        if self._path.exists():
            with self._path.open("r+b") as file:
                file.truncate(position)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self.truncate_to(self.position())  # cuts off a torn last line
        return FileIO(self._path, "ab")


def read_metrics(path: Path) -> dict[str, Series]:
    """Return every metric of a log by name; ValueError names the file and line that is damaged."""
    found: dict[str, Series] = {}
    for _, line in read_lines(path):
        step = line.pop(_STEP)
        for name, value in line.items():
            if isinstance(value, list) or (isinstance(value, str) and value not in _NON_FINITE):
                continue
            series = found.setdefault(name, Series())
            series.steps.append(step)
            series.values.append(float(value))
    return found


def read_counts(path: Path) -> dict[str, dict[int, list[int]]]:
    """Return every list of counts by name and step, the later line where two share both.

    ValueError as above.
    """
    found: dict[str, dict[int, list[int]]] = {}
    for _, line in read_lines(path):
        for name, value in line.items():
            if isinstance(value, list):
                found.setdefault(name, {})[line[_STEP]] = value
    return found


def read_text(path: Path, key: str) -> dict[int, str]:
    """Return a text entry by step, the later line where two share one; ValueError as above."""
    return {line[_STEP]: line[key] for _, line in read_lines(path) if key in line}


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give each whole line as it stands, with its number from 1; ValueError as above."""
    *whole, _torn = path.read_bytes().split(b"\n")
    for number, raw in enumerate(whole, start=1):
        try:
            line = json.loads(raw)
        except ValueError as error:
            raise ValueError(f"{path}: line {number} must be JSON, is {raw[:60]!r}") from error
        if not _is_sealed(raw):
            raise ValueError(
                f"{path}: line {number} must end in the checksum of what it says, is damaged or "
                f"edited: {raw[:60]!r}"
            )
        if not isinstance(line, dict) or not isinstance(line.get(_STEP), int):
            raise ValueError(f"{path}: line {number} must be an object with a step: {raw[:60]!r}")
        odd = [name for name, value in line.items() if not _is_entry(value)]
        if odd:
            raise ValueError(
                f"{path}: line {number}: {odd[0]} must be a number, a text or a list of counts"
            )
        line.pop(_CRC)
        yield number, line


def _sealed(text: bytes) -> bytes:
    """Return a JSON object with its checksum as last key, and a newline."""
    said = text.removesuffix(b"}")
    return said + f', "{_CRC}": "{zlib.crc32(said):08x}"}}\n'.encode()


def _is_sealed(line: bytes) -> bool:
    said, comma, _ = line.rpartition(b", ")
    return bool(comma) and _sealed(said + b"}") == line + b"\n"


def _is_entry(value: Any) -> bool:
    return _are_counts(value) if isinstance(value, list) else isinstance(value, int | float | str)


def _are_counts(values: list[Any]) -> bool:
    return bool(values) and all(type(value) is int and value >= 0 for value in values)


def _check_names(
    metrics: Mapping[str, float], counts: Mapping[str, list[int]], text: Mapping[str, str]
) -> None:
    seen = {_STEP, _CRC}
    twice = [name for name in (*metrics, *counts, *text) if name in seen or seen.add(name)]
    if twice:
        raise ValueError(f"MetricLog.append: {twice[0]!r} must be given once; rename one")
    for name, value in text.items():
        if value in _NON_FINITE:
            raise ValueError(
                f"MetricLog.append: {name} must not be the text {value!r}, which is read as a "
                "number; pass a number among the metrics"
            )


def _check_counts(counts: Mapping[str, list[int]]) -> None:
    for name, values in counts.items():
        if not _are_counts(values):
            raise ValueError(
                f"MetricLog.append: {name} must be one or more whole numbers >= 0, got {values!r}; "
                "pass other numbers among the metrics"
            )


def _to_json(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)
