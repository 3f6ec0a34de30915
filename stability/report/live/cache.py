"""Caches a value computed from a study's records: it is made once for each state of the records.

Threads that ask for one study at the same time share one making. Leaves out what the value is:
parsed records, pages and summaries (`served_pages`).
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
"""How long a value is left alone, in multiples of the time it took to make: a server that shows a
study while it trains then takes at most about a tenth of a core from the training."""


@dataclass(frozen=True, slots=True)
class _Entry(Generic[T]):
    value: T
    stamp: str
    """The stamp of the records that the value was made from (`StudyFolder.stamp`)."""
    seconds: float
    """How long the value took to make."""
    at: float
    """When it was finished, in seconds of the monotonic clock."""


class StudyCache(Generic[T]):
    """Makes values from studies' records and keeps those of the `most` recently requested studies.

    `make(folder, earlier)` returns the value; `earlier` is the value of the study's older records,
    or None if the cache has none, so that `make` may reuse parts of it. An error that `make` raises
    reaches the caller and leaves the cache as it was.
    """

    def __init__(self, make: Callable[[StudyFolder, T | None], T], most: int) -> None:
        self._make = make
        self._most = most
        self._entries: dict[str, _Entry[T]] = {}
        # one lock for each study, so that a slow one delays no other; `_lock` guards changes of
        # the dicts
        self._making: dict[str, threading.Lock] = {}
        self._lock = threading.Lock()

    def get(self, folder: StudyFolder) -> T:
        """Return the value for the records as `folder.stamp` identifies them; make it if need be.

        Waits if another thread is making the same study's value.
        """
        with self._lock:
            making = self._making.setdefault(folder.name, threading.Lock())
        with making:
            entry = self._entries.get(folder.name)
            if entry is None or entry.stamp != folder.stamp:
                entry = self._timed(folder, entry.value if entry else None)
            self._store(folder.name, entry)
            return entry.value

    def last(self, name: str) -> T | None:
        """Return the cached value of study `name`, even one of older records; None without one."""
        entry = self._entries.get(name)
        return entry.value if entry else None

    def stamp(self, name: str) -> str:
        """Return the stamp of the records that the cached value was made from; "" without one."""
        entry = self._entries.get(name)
        return entry.stamp if entry else ""

    def is_due(self, folder: StudyFolder) -> bool:
        """Whether to make the value anew now: the records changed and `PAUSE` is over.

        True also where the cache has no value of the study.
        """
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
            self._entries[name] = entry  # at the end: the first is dropped first
            while len(self._entries) > self._most:
                del self._entries[next(iter(self._entries))]
