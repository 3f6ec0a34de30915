"""A second process that reads records, because Python's threads share one core.

The process is started anew and imports this package alone. That is safe from any thread and any
program, where a fork would copy other threads' locks and `multiprocessing` would run the caller's
main module again. Leaves out what is worth a process (`analysis.study_records`, `report.live`).
"""

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypeVar

__all__ = ["ReaderProcess", "serve"]

T = TypeVar("T")

_PROGRAM = f"import sys; from {__name__} import serve; serve(*sys.argv[1:])"


class ReaderProcess(Generic[T]):
    """Calls a function of this package elsewhere, for one path at a time; a context manager.

    What the function returns is pickled. OSError if the process can't start.
    """

    def __init__(self, function: Callable[[Path], T]) -> None:
        self._function = function
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _PROGRAM, function.__module__, function.__name__],
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

    def read(self, path: Path) -> T:
        """Return what the function does; a process that has died is done without."""
        try:
            pickle.dump(path, self._asks)
            self._asks.flush()
            found = pickle.load(self._answers)
        except (OSError, EOFError, pickle.UnpicklingError):
            return self._function(path)
        if isinstance(found, Exception):
            raise found
        return found


def serve(module: str, name: str) -> None:
    """Answer each path on standard input with what the function says, or why it can't."""
    function = getattr(importlib.import_module(module), name)
    while True:
        try:
            path = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = function(path)
        except (ValueError, OSError) as error:
            found = error
        pickle.dump(found, sys.stdout.buffer, protocol=pickle.HIGHEST_PROTOCOL)
        sys.stdout.buffer.flush()
