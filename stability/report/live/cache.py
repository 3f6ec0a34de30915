"""A cache of what is made from the records of studies: each value made once, by one thread.

Leaves out what is made: records read (`analysis.study_records`), pages and summaries.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from stability.report.live.study_index import StudyFolder

__all__ = ["StudyCache"]

T = TypeVar("T")

PAUSE = 10
"""What took one second to make is not due again for so many seconds: a server that shows a study
while it trains then takes at most a tenth of a core from it."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    stamp: str
    seconds: float
    """How long it took to make."""
    at: float
    """When it was done, by the monotonic clock."""


class StudyCache(Generic[T]):
    """Makes a value of a study's records, and keeps it for the `most` studies asked for last.

    `make` is given the study's folder and the value made of its earlier records, if that is still
    in the cache. An error that it raises is passed on and leaves the cache as it was.
    """

    def __init__(self, make: Callable[[StudyFolder, T | None], T], most: int) -> None:
        self._make = make
        self._most = most
        self._entries: dict[str, _Entry[T]] = {}
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, folder: StudyFolder) -> T:
        """Return the value for the records of that stamp; waits where another thread makes it."""
        with self._lock:
            making = self._making.setdefault(folder.name, threading.Lock())
        with making:
            entry = self._entries.get(folder.name)
            if entry is None or entry.stamp != folder.stamp:
                entry = self._timed(folder, entry.value if entry else None)
            self._store(folder.name, entry)
            return entry.value

    def last(self, name: str) -> T | None:
        """Return the value in the cache, be it of older records; None if there is none."""
        entry = self._entries.get(name)
        return entry.value if entry else None

    def stamp(self, name: str) -> str:
        """Return the stamp of the records whose value is in the cache; empty if none is."""
        entry = self._entries.get(name)
        return entry.stamp if entry else ""

    def is_due(self, folder: StudyFolder) -> bool:
        """Return whether the records have changed and the last making lies long enough back."""
        entry = self._entries.get(folder.name)
        if entry is None:
            return True
        waited = time.monotonic() - entry.at
        return entry.stamp != folder.stamp and waited >= PAUSE * entry.seconds

    def _timed(self, folder: StudyFolder, earlier: T | None) -> _Entry[T]:
        start = time.monotonic()
        value = self._make(folder, earlier)
        end = time.monotonic()
        return _Entry(value, folder.stamp, end - start, end)

    def _store(self, name: str, entry: _Entry[T]) -> None:
        with self._lock:
            self._entries.pop(name, None)
            self._entries[name] = entry  # the newest is last
            while len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]
