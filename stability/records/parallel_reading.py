"""A second process that reads metric logs, because Python's threads share one core.

The process is started anew and imports this package alone. That is safe from any thread and any
program, where a fork would copy other threads' locks and `multiprocessing` would run the caller's
main module again. Leaves out which logs are worth a process (`analysis.study_records`).
"""

import os
import pickle
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from stability.records.events import Event, read_log_and_events
from stability.records.metric_log import LogContent

__all__ = ["LogReaderProcess", "serve"]

_PROGRAM = f"from {__name__} import serve; serve()"


class LogReaderProcess:
    """Reads logs elsewhere, one at a time; use as a context manager. OSError if it can't start."""

    def __init__(self) -> None:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # on Ctrl-C, this process is the one to speak
            env={**os.environ, "PYTHONPATH": path},
        )
        assert self._process.stdin
        assert self._process.stdout
        self._asks, self._answers = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def read(self, path: Path) -> tuple[LogContent, list[Event]]:
        """Return what `read_log_and_events` does; a process that has died is done without."""
        try:
            pickle.dump(path, self._asks)
            self._asks.flush()
            found = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            return read_log_and_events(path)
        if isinstance(found, Exception):
            raise found
        return found


def serve() -> None:
    """Answer each path on standard input with what the log says, or why it can't be read."""
    while True:
        try:
            path = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = read_log_and_events(path)
        except (ValueError, OSError) as error:
            found = error
        pickle.dump(found, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
