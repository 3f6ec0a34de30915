"""What is made of a study's records, kept until the records change, and made by one thread alone.

Leaves out what is made: reading (`analysis.recorded`), pages and summaries.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stability.report.live.study_index import Found

__all__ = ["Kept"]

T = TypeVar("T")

PAUSE = 10
"""What took a second to make is due again after so many, so that a server that shows a study while
it trains takes at most a tenth of a core from it."""


@dataclass(frozen=True, slots=True)
class _Made(Generic[T]):
    value: T
    stamp: str
    took: float
    """Seconds."""
    at: float
    """When it was done, by the monotonic clock."""


class Kept(Generic[T]):
    """Makes a value of a study, and keeps it for the `most` studies asked for last.

    `make` is given the study and the value that it made of the study's earlier records, if that is
    still kept; an error of it is passed on, and nothing is kept.
    """

    def __init__(self, make: Callable[[Found, T | None], T], most: int) -> None:
        self._make = make
        self._most = most
        self._made: dict[str, _Made[T]] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, found: Found) -> T:
        """Return the value for the records as `found` saw them; waits where it is being made."""
        with self._lock:
            making = self._making.setdefault(found.name, threading.Lock())
        with making:
            made = self._made.get(found.name)
            if made is None or made.stamp != found.stamp:
                made = self._timed(found, made.value if made else None)
            self._keep(found.name, made)
            return made.value

    def last(self, name: str) -> T | None:
        """Return what is kept of a study, of whichever records; None if nothing is."""
        made = self._made.get(name)
        return made.value if made else None

    def is_due(self, found: Found) -> bool:
        """Whether the records have changed, and the last making lies long enough back."""
        made = self._made.get(found.name)
        if made is None:
            return True
        return made.stamp != found.stamp and time.monotonic() - made.at >= PAUSE * made.took

    def stamp(self, name: str) -> str:
        """Return the stamp of the records whose value is kept; empty if none is."""
        made = self._made.get(name)
        return made.stamp if made else ""

    def _timed(self, found: Found, earlier: T | None) -> _Made[T]:
        start = time.monotonic()
        value = self._make(found, earlier)
        end = time.monotonic()
        return _Made(value, found.stamp, end - start, end)

    def _keep(self, name: str, made: _Made[T]) -> None:
        with self._lock:
            self._made.pop(name, None)
            self._made[name] = made  # last is newest
            while len(self._made) > self._most:
                del self._made[next(iter(self._made))]
