"""Values as JSON can hold them: it has no NaN and no infinity, so those stand as text.

Leaves out writing them (`sealed_json`, `metric_log`).

JSON files that carry the checksum of what they say: a flipped bit is found, never read as data.

The key `checksum` holds the SHA-256 of the other keys in canonical JSON (sorted, no spaces). It
guards against damage, not against somebody who means to deceive. Leaves out the records themselves
(`manifest`, `probe_record`, a study's file) and logs that grow (`metric_log`).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stability.records.atomic_files import write_text

__all__ = ["NON_FINITE", "file_checksum", "jsonable", "read_sealed", "write_sealed"]

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


_CHECKSUM = "checksum"


def write_sealed(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as JSON with its checksum, whole or not at all."""
    sealed = {**content, _CHECKSUM: _checksum(content)}
    write_text(path, json.dumps(sealed, indent=2) + "\n")


def read_sealed(path: Path, writer: str) -> dict[str, Any]:
    """Return what `write_sealed` wrote to `path`, without the checksum.

    ValueError, one line that names the file, if it is missing (then `writer` says what makes it),
    torn, no JSON object, or not what was written.
    """
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise ValueError(f"{path}: there is no such file; {writer} writes it") from error
    except OSError as error:
        raise ValueError(f"{path}: must be a file that can be read: {error.strerror}") from error
    except ValueError as error:
        raise ValueError(f"{path}: must be JSON, is torn or damaged: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path}: must be a JSON object, is {type(content).__name__}")
    if content.pop(_CHECKSUM, None) != _checksum(content):
        raise ValueError(
            f"{path}: must have the checksum of what it says, has not; it was damaged or edited"
        )
    return content


def file_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; OSError if it can't be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksum(content: Mapping[str, Any]) -> str:
    # through JSON and back: what is read is strings and lists, where keys or tuples were written
    plain = json.loads(json.dumps(content))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
