"""The operations by which our records change a disk: one function each, and no other way.

Whoever wants to know, or to spoil, what a run does to its files replaces these functions: the tests
record them, let each fail, and replay every state in which a power cut may leave a disk between
them. So callers name them by this module, `file_operations.rename(...)`. None decides anything:
what makes a file whole is in `atomic_files`, what makes a log readable in `metric_log`. Leaves out
W&B, which writes its folder by itself, and reading.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

__all__ = [
    "allowed_by",
    "append_to",
    "fill",
    "link",
    "lock",
    "make_folder",
    "open_lock",
    "remove_folder",
    "rename",
    "sync",
    "touch",
    "truncate",
    "unlink",
    "write",
]


_checks: list[Callable[[], None]] = []


@contextmanager
def allowed_by(check: Callable[[], None]) -> Iterator[None]:
    """Inside, call `check` before each change of a file; it raises where none may be made."""
    _checks.append(check)
    try:
        yield
    finally:
        _checks.remove(check)


def _ask() -> None:
    for check in _checks:
        check()


def make_folder(path: Path) -> None:
    """Make one folder; FileExistsError if the name is taken."""
    _ask()
    path.mkdir()


def fill(path: Path, content: Callable[[Path], object]) -> None:
    """Let `content` write a new file at `path`, most often by a library that takes a path."""
    _ask()
    content(path)


def append_to(path: Path) -> FileIO:
    """Open a file to write at its end, without a buffer; it is made if there is none."""
    _ask()
    return FileIO(path, "ab")


def write(file: FileIO, data: bytes) -> int:
    """Write to the end of an open file; return how many bytes it took, fewer on a full disk."""
    _ask()
    return file.write(data) or 0


def truncate(path: Path, length: int) -> None:
    """Cut a file to `length` bytes."""
    _ask()
    os.truncate(path, length)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, from the page cache to the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Give a file another name; a file that had that name is gone."""
    _ask()
    os.replace(source, target)


def link(source: Path, target: Path) -> None:
    """Give a file a second name; FileExistsError if that is taken."""
    _ask()
    os.link(source, target)


def unlink(path: Path) -> None:
    """Take away a file's name; FileNotFoundError if there is none."""
    _ask()
    path.unlink()


def remove_folder(path: Path) -> None:
    """Take away an empty folder; OSError if it is none, or holds something."""
    _ask()
    path.rmdir()


def touch(path: Path) -> None:
    """Set a file's time to now; FileNotFoundError if there is none."""
    os.utime(path)


def open_lock(path: Path) -> FileIO:
    """Open a file that is there to be locked, never written; it is made if there is none."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666), "r+b")


def lock(file: FileIO) -> None:
    """Lock an open file for this process alone; BlockingIOError if another one has it locked."""
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
