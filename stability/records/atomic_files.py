"""Files that are whole or not there: written beside their place, forced to disk, renamed.

Leaves out appending, which tears at most the last line (`metric_log`).
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DiskFullError", "atomic_path", "is_disk_full", "write_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(OSError):
    """The disk takes no more; what was written before is whole."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether `error`, or what caused it, is a disk that takes no more.

    Libraries in other languages (safetensors) tell it in words: "(os error 28)".
    """
    while error is not None:
        if getattr(error, "errno", None) in _FULL:
            return True
        if any(f"os error {code})" in str(error) for code in _FULL):
            return True
        if isinstance(error, DiskFullError):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path to write to; it becomes `path` if the block ends without an error.

    Folders are made. DiskFullError if the disk takes no more. After an error `path` is as it was
    and the temporary file is gone; a process killed in between leaves `path` as it was and a file
    `.<name>.<random>.tmp` beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _sync(temporary)
        os.replace(temporary, path)
    except Exception as error:
        if is_disk_full(error):
            raise DiskFullError(f"{path}: the disk is full") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all.

    Half a surrogate pair, as the name of a file may hold, is written as `\\ud800`, which JSON reads
    back as what it was.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
