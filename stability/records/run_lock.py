"""The lock of a run's folder: who holds it trains the run, and it ends with its process.

Readers ask for it too, to tell a run in training from one whose process was killed, which still
says `running` in its manifest. Leaves out what a held lock means to a study (`study.run`).
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

from stability.records.paths import RunPaths

__all__ = ["hold", "is_held"]

PATIENCE_S = 2.0
"""How long a writer tries. A reader that asks holds the lock for some microseconds, and the process
that trains for a command that was killed may take a moment to die."""
PAUSE_S = 0.02


@contextmanager
def hold(paths: RunPaths) -> Iterator[None]:
    """Hold the lock of a run; BlockingIOError if another process does."""
    paths.root.mkdir(parents=True, exist_ok=True)
    with paths.lock.open("w") as file:
        end = time.monotonic() + PATIENCE_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= end:
                    raise
                time.sleep(PAUSE_S)
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
    try:
        # shared, so that two readers don't take each other for the process
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # held, or on a file system without locks
        return True
    finally:
        os.close(file)
    return False
