"""Opens files to read them, and nothing but plain files: the one way in which records are read.

Where a record should be, a folder from elsewhere may hold a named pipe, at which a reader waits for
ever, a device that never ends, or a socket. None of them is opened. Leaves out what is in a file,
and the files of `/proc` and of this package, which nobody else writes.
"""

import errno
import io
import os
import stat
from pathlib import Path

__all__ = ["MOST_BYTES", "check_plain", "open_plain", "read_plain"]

MOST_BYTES = 2**28
"""Most that is read into memory at once: a thousand times the largest record of our own studies."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_plain(path: Path) -> io.BufferedReader:
    """Open a plain file, or a link to one; OSError, which names it, for anything else."""
    return io.BufferedReader(io.FileIO(path, "rb", opener=_open), 2**20)


def read_plain(path: Path) -> bytes:
    """Return the bytes of a plain file; OSError as above, and for one that is far too long."""
    with io.FileIO(path, "rb", opener=_open) as file:
        size = os.fstat(file.fileno()).st_size
        if size > MOST_BYTES:
            # a file may say that it holds a terabyte and take no room on the disk
            raise OSError(errno.EFBIG, f"holds {size} bytes, more than any record", str(path))
        return file.read()


def check_plain(path: Path) -> Path:
    """Return `path`, for a library that opens it by itself; OSError as above."""
    _check_mode(os.stat(path).st_mode, path)
    return path


def _open(path: str, flags: int) -> int:
    # before it is opened: with some devices the opening alone does something
    _check_mode(os.stat(path).st_mode, path)
    # a pipe that takes the file's place meanwhile is not waited for
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_mode(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_mode(mode: int, path: str | Path) -> None:
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if not stat.S_ISREG(mode):
        kind = _KINDS.get(stat.S_IFMT(mode), "something else")
        raise OSError(errno.EINVAL, f"Is {kind}, must be a plain file", str(path))
