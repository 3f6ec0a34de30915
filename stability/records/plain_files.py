"""Opens files to read them, and nothing but plain files: the one way in which records are read.

Where a record should be, a folder from elsewhere may hold a named pipe, at which a reader waits for
ever, a device that never ends, or a socket. None of them is opened. Nor is a file read that says it
holds a terabyte and takes no room on the disk. Leaves out what is in a file, and the files of
`/proc` and of this package, which nobody else writes.
"""

import errno
import io
import os
import stat
from pathlib import Path

__all__ = ["MOST_BYTES", "HollowFileError", "check_plain", "open_plain", "read_plain"]

MOST_BYTES = 2**28
"""Most that is read into memory at once: a thousand times the largest record of our own studies."""

_DATA_SHARE = 64
"""Of a file above that size at least one byte in so many must have been written; ours all have."""

_KINDS = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class HollowFileError(OSError):
    """A large file is nearly all holes: reading it would take hours and give zeros."""


def open_plain(path: Path) -> io.BufferedReader:
    """Open a plain file, or a link to one; OSError, which names it, for anything else.

    HollowFileError for a large one that is nearly all holes.
    """
    file = io.FileIO(path, "rb", opener=_open)
    try:
        _check_filled(file.fileno(), path)
    except OSError:
        file.close()
        raise
    return io.BufferedReader(file, 2**20)


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
    found = os.stat(path)
    _check_mode(found.st_mode, path)
    if found.st_size > MOST_BYTES:
        open_plain(path).close()
    return path


def _check_filled(descriptor: int, path: Path) -> None:
    size = os.fstat(descriptor).st_size
    if size > MOST_BYTES and not _has_data(descriptor, size // _DATA_SHARE):
        said = f"holds {size} bytes, nearly all of them holes, which nobody has written"
        raise HollowFileError(errno.EFBIG, said, str(path))


def _has_data(descriptor: int, least: int) -> bool:
    """Whether more than `least` bytes of an open file are no holes; its position stays at 0.

    A file system that knows no holes says that all is data.
    """
    found = end = 0
    try:
        while found <= least:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
            end = os.lseek(descriptor, start, os.SEEK_HOLE)
            found += end - start
    except OSError as error:
        return error.errno != errno.ENXIO  # no data after `end`
    finally:
        os.lseek(descriptor, 0, os.SEEK_SET)
    return True


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
