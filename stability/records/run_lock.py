"""The lock of a run's folder: who holds it trains the run, and it ends with its process.

Readers ask for it too, to tell a run in training from one whose process was killed, which still
says `running` in its manifest. Where the file system has no locks, as some network file systems, a
lease does the same (`run_lease`); who has the lock writes one too, for those who can't see it.
Leaves out what a held lock means to a study (`study.run`).
"""

import errno
import fcntl
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from io import FileIO
from typing import TypeVar

from stability.records import file_operations
from stability.records.atomic_files import make_folders, naming
from stability.records.paths import RunPaths
from stability.records.run_lease import is_leased, lease

__all__ = ["hold", "is_held"]

T = TypeVar("T")

PATIENCE_S = 2.0
"""How long a writer tries. A reader that asks holds the lock for some microseconds, and the process
that trains for a command that was killed may take a moment to die."""
PAUSE_S = 0.02
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS)
"""How a file system says that it has none. ENOLCK may also be a server that has none left."""


@contextmanager
def hold(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a run; BlockingIOError if another process does."""
    make_folders(paths.root)
    with ExitStack() as stack:
        with naming(paths.lock):
            file = stack.enter_context(file_operations.open_lock(paths.lock))
            is_locked = _patiently(lambda: _lock(file))
        _patiently(lambda: stack.enter_context(lease(paths, has_lock=is_locked)))
        yield


def is_held(paths: RunPaths) -> bool:
    """Return whether a process holds the lock of a run; True where that can't be known.

    A run without a lock's file has no process: whoever trains makes it before anything else.
    """
    try:
        # a pipe of that name must not make a reader wait
        file = os.open(paths.lock, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    could_lock = True
    try:
        # shared, so that two readers don't take each other for the process
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in NO_LOCKS:
            return True
        could_lock = False
    finally:
        os.close(file)
    return is_leased(paths, could_lock=could_lock)


def _lock(file: FileIO) -> bool:
    """Return whether the file is locked now, which it can't be where there are no locks."""
    end = time.monotonic() + PATIENCE_S / 2
    while True:
        try:
            file_operations.lock(file)
            return True
        except OSError as error:
            if error.errno not in NO_LOCKS:
                raise
            # another process may have got a lock before the server ran out of them
            if error.errno != errno.ENOLCK or time.monotonic() >= end:
                return False
        time.sleep(PAUSE_S)


def _patiently(attempt: Callable[[], T]) -> T:
    """Try until nothing stands in the way, for PATIENCE_S; then BlockingIOError."""
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            return attempt()
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
        # of two that give way to each other, one comes back first
        time.sleep(PAUSE_S * (1 + random.random()))
