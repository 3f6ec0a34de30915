"""JSON files that carry the checksum of their content: a flipped bit is found, never read as data.

The key `checksum` holds the SHA-256 of the other keys in canonical JSON (sorted, no spaces). It
guards against damage, not against somebody who means to deceive. JSON has no NaN and no infinity,
so those stand as text (`jsonable`). Leaves out the records themselves (`manifest`, `probe_record`,
`waterfall_record`) and logs that grow (`metric_log`).
"""

import difflib
import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from stability.records.atomic_files import write_text
from stability.records.plain_files import open_plain, read_plain
from stability.records.record_types import check_plain_json, check_type

__all__ = [
    "NON_FINITE",
    "DamagedError",
    "file_checksum",
    "jsonable",
    "parse_json",
    "read_record",
    "read_sealed",
    "write_sealed",
]

T = TypeVar("T")

_CHECKSUM = "checksum"


class DamagedError(ValueError):
    """A file does not hold what was written: torn, or with another checksum."""


NON_FINITE = frozenset({"nan", "inf", "-inf"})
"""What stands for a number that JSON does not have."""


def jsonable(content: Any) -> Any:
    """Return `content` with "nan", "inf" and "-inf" for such numbers, however deep they are."""
    if isinstance(content, Mapping):
        return {name: jsonable(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [jsonable(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return str(content)
    return content


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON with its checksum, whole or not at all."""
    sealed = {**content, _CHECKSUM: _checksum(content)}
    write_text(path, json.dumps(sealed, indent=2) + "\n")


def read_sealed(path: Path, writer: str) -> dict[str, Any]:
    """Return what `write_sealed` wrote to `path`, without the checksum.

    ValueError, one line that names the file, if it is missing, no plain file or can't be read,
    DamagedError if it is truncated, no JSON object or nested deeper than any record, or if its
    checksum is wrong. For a missing file it also says which command (`writer`) writes it.
    """
    try:
        content = parse_json(read_plain(path))
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file; {writer} writes it") from error
    except OSError as error:
        raise ValueError(f"{path}: must be a file that can be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedError(f"{path}: must be JSON, is torn or damaged: {error}") from error
    if not isinstance(content, dict):
        raise DamagedError(f"{path}: must be a JSON object, is {type(content).__name__}")
    if content.pop(_CHECKSUM, None) != _checksum(content):
        raise DamagedError(
            f"{path}: must have the checksum of what it says, has not; it was damaged or edited"
        )
    return content


def parse_json(data: bytes) -> Any:
    """Return what JSON says; ValueError, a clause, if it is none, or none that we could write."""
    try:
        content = json.loads(data)
    except RecursionError as error:
        raise ValueError("is nested too deep to be read") from error
    check_plain_json(content)
    return content


@cache
def _hints(record: type) -> Mapping[str, Any]:
    return get_type_hints(record, include_extras=True)


def read_record(path: Path, record: type[T], writer: str, kind: str = "record") -> T:
    """Return the dataclass `record` that `write_sealed` wrote to `path` field by field.

    `kind` is what the file is called in a message. A field with a default may be missing: it was
    added since. ValueError as `read_sealed`, and for keys or types that are not those of the
    fields, however deep those are declared (`record_types`).
    """
    content = read_sealed(path, writer)
    hints = _hints(record)
    known = fields(record)  # pyright: ignore[reportArgumentType]
    names = [field.name for field in known]
    optional = {x.name for x in known if (x.default, x.default_factory) != (MISSING, MISSING)}
    for name in content:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=3, cutoff=0.4) or names
            raise ValueError(f"{path}: unknown key {name[:80]!r}; nearest: {', '.join(near)}")
    missing = [name for name in names if name not in content and name not in optional]
    if missing:
        raise ValueError(f"{path}: missing key {', '.join(missing)}; it is no whole {kind}")
    try:
        for name in content:
            check_type(content[name], hints[name], name)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    return record(**content)


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; OSError if it can't be read or is no plain file."""
    with open_plain(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    # through JSON and back: what is read is strings and lists, where keys or tuples were written
    plain = json.loads(json.dumps(content))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
