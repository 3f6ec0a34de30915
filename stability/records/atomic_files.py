"""Writes files atomically: to a temporary name beside them, forced to disk, then renamed.

So a reader finds either the old file or the new one, whole, even if the writer is killed. Leaves
out appending, where a kill tears at most the last line (`metric_log`).
"""

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["DiskFullError", "atomic_path", "is_disk_full", "write_text"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""A full disk, a used-up quota, and a file at the size limit of the process or file system."""


class DiskFullError(OSError):
    """The disk is full; the files that were written before are whole."""


def is_disk_full(error: BaseException | None) -> bool:
    """Whether `error`, or an error in its chain of causes, says that the disk is full.

    safetensors, written in Rust, raises an error without an errno; its text holds "(os error
    28)".
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
    """Yield a temporary path to write to, and rename it to `path` if the block raises nothing.

    Missing parent folders are created. DiskFullError if the disk is full. After an error `path` is
    unchanged and the temporary file is deleted. If the process is killed `path` is unchanged too,
    but a file `.<name>.<random>.tmp` may stay beside it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        _sync(temporary)  # else the name could reach the disk before the content does
        os.replace(temporary, path)
    except Exception as error:
        if is_disk_full(error):
            raise DiskFullError(f"{path}: the disk is full") from error
        raise
    finally:
        temporary.unlink(missing_ok=True)
    _sync(path.parent)  # a rename is on disk only once its folder is


def write_text(path: Path, text: str) -> None:
    """Write `text` to `path` in UTF-8, whole or not at all.

    A lone surrogate, which UTF-8 cannot hold but a file's name may, is written as its escape, e.g.
    `\\ud800`; in a JSON string that reads back as the same character.
    """
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8", "backslashreplace"))


def _sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
