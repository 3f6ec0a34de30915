"""The end of a process that was forked: multiprocessing leaves it without its exit functions."""

from __future__ import annotations

import sys
from multiprocessing.util import Finalize
from typing import Callable

__all__ = ["end_with_fork"]


def end_with_fork(end: Callable[[str], None]) -> None:
    """Call `end`, with the reason, when a process of multiprocessing ends.

    To be called in that process, which has dropped what its parent had registered. One that a
    script has forked itself calls its exit functions, or leaves by `os._exit`: then nobody knows.
    """

    def ended() -> None:
        error = sys.exc_info()[1]
        is_exit = error is None or (isinstance(error, SystemExit) and error.code in (None, 0))
        end("exit" if is_exit else "error")

    Finalize(None, ended, exitpriority=100)
