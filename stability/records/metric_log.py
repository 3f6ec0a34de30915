"""The metric log of a run: JSON lines, one per logged step and source, flushed as they are written.

A line is `{"step": 3, "train/loss": 1.25, "crc": "5f1c60c2"}`; several lines may share a step. JSON
has no NaN and no infinity, so they stand as the strings "nan", "inf" and "-inf"; any other string
is a text entry, not a metric, and neither is a list, which holds the counts of a histogram. A line
is one `write` and ends in a newline: a process killed while writing leaves at most a torn last
line, which readers ignore and the next writer cuts off. `crc` is the CRC-32 of what stands before
it, so that a flipped bit is found.

Readers get the metrics in columns (`metric_columns`). `sync` forces the lines to disk, and a
checkpoint waits for it: a power cut costs at most the lines after it. Leaves out what the names
mean (`metric_names`).
"""

import json
import math
import sys
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import FileIO
from itertools import count
from pathlib import Path
from struct import error as StructError
from struct import pack
from typing import IO, Any

import orjson

from stability.records import file_operations
from stability.records.atomic_files import DiskFullError, make_folders, naming
from stability.records.metric_columns import MetricColumns
from stability.records.plain_files import open_plain
from stability.records.sealed_json import NON_FINITE

__all__ = [
    "LogContent",
    "MetricLog",
    "difference_from",
    "hash_start",
    "read_lines",
    "read_log",
    "read_metrics",
    "read_start",
    "read_text",
]


MOST_OF_A_LINE = 2**26
"""Bytes; no step logs as much, and a file without line ends is not read into memory."""
_STEP = "step"
_CRC = "crc"


class MetricLog:
    """Appends to one run's log. Opens at the first line, so that making one writes nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: FileIO | None = None
        self._is_named = False
        """Whether the file's name has been forced to disk; its content may have been without."""
        self._hashed = sha256()
        self._hashed_bytes = 0

    def append(
        self,
        step: int,
        metrics: Mapping[str, float],
        counts: Mapping[str, Sequence[int]] | None = None,
        **text: str,
    ) -> None:
        """Write one line for `step`: numbers and counts by metric name, text entries by keyword.

        Counts are one or more whole numbers >= 0. ValueError for others, for a name that is given
        twice or is "step" or "crc", or a text that would be read back as a number; OSError, which
        names the file, if the system refuses, DiskFullError if the disk takes no more; the line is
        lost, the log is not.
        """
        lists = {name: list(values) for name, values in (counts or {}).items()}
        _check_names(metrics, lists, text)
        _check_counts(lists)
        numbers = {name: _to_json(float(x)) for name, x in metrics.items()}
        line = {_STEP: step, **numbers, **lists, **text}
        encoded = _sealed(json.dumps(line, allow_nan=False).encode())
        with naming(self._path):
            if self._file is None:
                self._file = self._open()
            written = 0
            try:
                written = file_operations.write(self._file, encoded)
            finally:
                if written != len(encoded):
                    self.close()  # the next append cuts off what was written
        if written != len(encoded):
            raise DiskFullError(
                f"{self._path}: the disk is full, wrote {written} of {len(encoded)} bytes"
            )

    def sync(self) -> None:
        """Force every line that was written to disk, and the file's name with them.

        OSError, which names the file, if the disk does not take them: nothing may count on them.
        """
        with naming(self._path):
            if not self._path.exists():
                return
            file_operations.sync(self._path)
            if not self._is_named:
                file_operations.sync(self._path.parent)
                self._is_named = True

    def position(self) -> int:
        """Return the length of the log in bytes: whole lines only."""
        if self._file is not None:
            return self._file.tell()
        if not self._path.exists():
            return 0
        with open_plain(self._path) as file:
            return file.read().rfind(b"\n") + 1

    def hash_until(self, position: int) -> str:
        """Return the SHA-256 of the first `position` bytes; only what is new is read again."""
        if position < self._hashed_bytes:
            self._hashed, self._hashed_bytes = sha256(), 0
        if position > self._hashed_bytes:
            with open_plain(self._path) as file:
                file.seek(self._hashed_bytes)
                _hash_into(self._hashed, file, position - self._hashed_bytes)
            self._hashed_bytes = position
        return self._hashed.hexdigest()

    def truncate_to(self, position: int) -> None:
        """Cut the log to `position` bytes, as `position()` once gave them.

        ValueError if the log is shorter: it has lost lines that a checkpoint counts on.
        """
        length = self.position()
        if length < position:
            raise ValueError(
                f"{self._path}: must be at least {position} bytes long to be cut there, is {length}"
            )
        self.close()
        self._hashed, self._hashed_bytes = sha256(), 0
        with naming(self._path):
            if self._path.exists():
                file_operations.truncate(self._path, position)

    def close(self) -> None:
        """Close the file; the next `append` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> FileIO:
        make_folders(self._path.parent)
        self.truncate_to(self.position())  # cuts off a torn last line
        return file_operations.append_to(self._path)


def hash_start(path: Path, length: int) -> str:
    """Return the SHA-256 of the first `length` bytes of a log, or of all if it is shorter."""
    digest = sha256()
    if length:
        with open_plain(path) as file:
            _hash_into(digest, file, length)
    return digest.hexdigest()


def difference_from(path: Path, length: int, sha256: str, *, is_whole: bool = False) -> str:
    """Return what is wrong with a log whose first `length` bytes had this SHA-256, mostly nothing.

    With `is_whole` nothing may follow them. An empty hash is none: only the length is compared.
    """
    found = path.stat().st_size if path.exists() else 0
    if found < length:
        return f"has lost its end: it must hold {length} bytes, holds {found}"
    if sha256 and hash_start(path, length) != sha256:
        return f"is damaged in its first {length} bytes"
    if is_whole and found > length:
        return f"must end after {length} bytes, where its writer closed it; holds {found}"
    return ""


def read_start(path: Path, length: int) -> bytes:
    """Return the first `length` bytes of a log, or all if it is shorter."""
    with open_plain(path) as file:
        return file.read(length)


def _hash_into(digest: Any, file: IO[bytes], length: int) -> None:
    while length > 0 and (part := file.read(min(length, 2**20))):
        digest.update(part)
        length -= len(part)


@dataclass(frozen=True, slots=True)
class LogContent:
    """What a log says."""

    metrics: MetricColumns = field(default_factory=MetricColumns)
    counts: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """By name and step, the later line where two share both."""
    kept: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """The lines that were to be kept, less their decimal numbers, with their own from 1."""


def read_log(path: Path, keep: Collection[str] = ()) -> LogContent:
    """Read a log in one pass, and keep what each line says that has an entry called as in `keep`.

    ValueError names the file and line that is damaged.
    """
    content = LogContent()
    for number, raw in _whole_lines(path):
        line = _quick(raw)
        if line is None or _has_any(line, keep) or not _take(content, number, line):
            line = _checked(path, number, raw)
            if _has_any(line, keep):
                said = {
                    name: value
                    for name, value in line.items()
                    if name in keep or type(value) is not float
                }
                content.kept.append((number, said))
            _take(content, number, line)
    return content


def _has_any(line: Mapping[str, Any], names: Collection[str]) -> bool:
    return not line.keys().isdisjoint(names)


def read_metrics(path: Path) -> MetricColumns:
    """Return every metric of a log by name; ValueError as above."""
    return read_log(path).metrics


def read_text(path: Path, key: str) -> dict[int, str]:
    """Return a text entry by step, the later line where two share one; ValueError as above."""
    return {line[_STEP]: line[key] for _, line in read_log(path, keep=[key]).kept}


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Give each whole line as it stands, with its number from 1; ValueError as above."""
    for number, raw in _whole_lines(path):
        yield number, _checked(path, number, raw)


def _whole_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    with open_plain(path) as file:
        for number in count(1):
            raw = file.readline(MOST_OF_A_LINE)
            if raw.endswith(b"\n"):
                yield number, raw
            elif len(raw) == MOST_OF_A_LINE:
                raise ValueError(f"{path}: line {number} must have fewer than {len(raw)} bytes")
            else:  # the end, or torn
                return


def _quick(raw: bytes) -> dict[str, Any] | None:
    """Return the entries of a line that is sealed; None if `_checked` has to say what it is.

    orjson is ten times as fast as json, but refuses some of what that takes, and reads a whole
    number beyond 64 bits as FP64.
    """
    if not _is_sealed(raw):
        return None
    try:
        line = orjson.loads(raw)
    except ValueError:
        return None
    del line[_CRC]
    return line


def _checked(path: Path, number: int, raw: bytes) -> dict[str, Any]:
    """Return the entries of a line, or raise the ValueError that says what is wrong with it."""
    start = raw[:-1][:60]
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: line {number} must be JSON, is {start!r}") from error
    if not _is_sealed(raw):
        raise ValueError(
            f"{path}: line {number} must end in the checksum of what it says, is damaged or "
            f"edited: {start!r}"
        )
    if not isinstance(line, dict) or not _is_step(line.get(_STEP)):
        raise ValueError(f"{path}: line {number} must be an object with a step: {start!r}")
    odd = [name for name, value in line.items() if not _is_entry(value)]
    if odd:
        raise ValueError(
            f"{path}: line {number}: {odd[0]} must be a number, a text or a list of counts"
        )
    del line[_CRC]
    return line


def _take(content: LogContent, number: int, line: dict[str, Any]) -> bool:
    """Take in the entries of a line; return False, with none of them taken, if one is unsound."""
    step = line.pop(_STEP, None)
    if not _is_step(step):
        return False
    try:
        numbers = pack(f"{len(line)}d", *line.values())  # refuses all but numbers
        names = tuple(line)
    except (StructError, OverflowError):
        if not all(map(_is_entry, line.values())):
            return False
        numbers, names = _take_mixed(content, step, line)
    if names:
        content.metrics.add(number, step, names, numbers)
    return True


def _take_mixed(
    content: LogContent, step: int, line: dict[str, Any]
) -> tuple[bytes, tuple[str, ...]]:
    """Take in the counts of a line; return its numbers as FP64 and their names."""
    numbers = {}
    for name, value in line.items():
        if isinstance(value, list):
            content.counts.setdefault(name, {})[step] = value
        elif not isinstance(value, str) or value in NON_FINITE:
            numbers[name] = float(value)
    return pack(f"{len(numbers)}d", *numbers.values()), tuple(numbers)


def _sealed(text: bytes) -> bytes:
    """Return a JSON object with its checksum as last key, and a newline."""
    said = text.removesuffix(b"}")
    return said + _seal(said)


def _seal(said: bytes | memoryview) -> bytes:
    return b', "%s": "%08x"}\n' % (_CRC.encode(), zlib.crc32(said))


_SEAL = len(_seal(b""))


def _is_sealed(line: bytes) -> bool:
    return line[-_SEAL:] == _seal(memoryview(line)[:-_SEAL])


def _is_step(value: Any) -> bool:
    return isinstance(value, int) and -(2**63) <= value < 2**63


def _is_entry(value: Any) -> bool:
    if isinstance(value, list):
        return _are_counts(value)
    if isinstance(value, int):
        return abs(value) <= sys.float_info.max
    return isinstance(value, float | str)


def _are_counts(values: list[Any]) -> bool:
    return set(map(type, values)) == {int} and min(values) >= 0


def _check_names(
    metrics: Mapping[str, float], counts: Mapping[str, list[int]], text: Mapping[str, str]
) -> None:
    seen = {_STEP, _CRC}
    twice = [name for name in (*metrics, *counts, *text) if name in seen or seen.add(name)]
    if twice:
        raise ValueError(f"MetricLog.append: {twice[0]!r} must be given once; rename one")
    for name, value in text.items():
        if value in NON_FINITE:
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
