"""The pages of all studies below one folder, made when asked for and cached until records change.

Safe to call from several threads. Leaves out HTTP (`server`) and what the pages hold (`page.html`,
`comparison`).
"""

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from urllib.parse import quote

from stability.analysis.ladder import ladder_of
from stability.analysis.probe_records import read_probe
from stability.analysis.study_records import RecordedStudy, read_study
from stability.records.parallel_reading import ReaderProcess
from stability.report.live.cache import StudyCache
from stability.report.live.comparison import render_comparison
from stability.report.live.study_index import StudyFolder, StudyIndex, hash_stamps
from stability.report.live.study_summary import (
    Summary,
    outline_of_study,
    read_summary,
    summary_of_error,
    summary_of_probe,
    summary_of_study,
)
from stability.report.live.summary_store import SummaryStore
from stability.report.page.html import fill, render, render_probe

__all__ = ["ServedPages", "address_of", "unreadable_page"]

PATIENCE = 1.0
"""Seconds that the list of studies waits for summaries that are still to be made."""
PAGES, SUMMARIES = 6, 1000
"""How many studies' records and pages, and how many summaries, are kept in memory."""
CLOSING_S = 2.0
"""Seconds that the end of the server waits for summaries in the making."""
WORTH_A_PROCESS = 15
"""Studies that take as long to sum up as another process takes to start."""
MOST_PROCESSES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """One line of the list of studies; `summary` is None until the records have been read."""

    name: str
    address: str
    newest: float
    newest_text: str
    summary: Summary | None


class ServedPages:
    """The pages of the studies below `root`, which is searched anew at each call.

    Summaries are kept in the folder `store` for the next dashboard; None keeps them in memory only.
    """

    def __init__(self, root: Path, store: Path | None = None) -> None:
        self._root = root.resolve()
        self._store = SummaryStore(store) if store else None
        self._index = StudyIndex(root)
        self._studies = StudyCache(_read, PAGES)
        self._pages = StudyCache(self._render, PAGES)
        self._summaries = StudyCache(self._summarise, SUMMARIES)
        self._outlines = StudyCache(self._outline, SUMMARIES)
        self._reader = threading.Thread()
        self._helpers: SimpleQueue[ReaderProcess[Summary]] = SimpleQueue()
        """Processes that sum up studies, those that are free."""
        self._starting = threading.Lock()
        self._closing = threading.Event()

    def close(self) -> None:
        """Begin no other summary, and wait for those in the making, but not for long.

        What is still in the making then ends with the program, and says nothing of it.
        """
        self._closing.set()
        if self._reader.ident:
            self._reader.join(CLOSING_S)

    def find(self) -> dict[str, StudyFolder]:
        """Return the studies and probes by name, the newest first."""
        return self._index.find()

    def index(self) -> str:
        """Return the page that lists all studies.

        Those that are not summed up within PATIENCE are shown without their numbers, and those
        whose manifests are not read by then are named only; the page asks for them later.
        """
        found = self.find()
        self._refresh(found).join(PATIENCE)
        stamp = self._index_stamp(found)
        listed = [
            _Listed(
                name=each.name,
                address=address_of(each.name),
                newest=each.newest,
                newest_text=f"{datetime.fromtimestamp(each.newest):%Y-%m-%d %H:%M}",
                summary=self._summaries.last(each.name) or self._outlines.last(each.name),
            )
            for each in found.values()
        ]
        folder = self._root.name or str(self._root)
        return fill(
            "index.html.j2", charts=[], sections=[], stamp=stamp, folder=folder, studies=listed
        )

    def index_stamp(self) -> str:
        """Return a stamp of the list as it would be shown now, and start to read what is new."""
        found = self.find()
        self._refresh(found)
        return self._index_stamp(found)

    def study(self, folder: StudyFolder) -> str:
        """Return the page of one study or probe, or one that says why it can't be read."""
        try:
            return self._pages.get(folder)
        except Exception as error:
            return unreadable_page(folder.name, self._message(folder.name, error), folder.stamp)

    def comparison(self, chosen: Sequence[StudyFolder], stamp: str) -> str:
        """Return the page on several studies, or one that says why one of them can't be read."""
        addresses = {folder.name: address_of(folder.name) for folder in chosen}
        try:
            studies = {folder.name: self._studies.get(folder) for folder in chosen}
            return render_comparison(studies, addresses, stamp)
        except Exception as error:
            names = ", ".join(addresses)
            return unreadable_page(names, self._message(names, error), stamp)

    def _message(self, name: str, error: Exception) -> str:
        """Return what is wrong with a study's records, for its page.

        One study must not take away the others' pages, so an error that nobody foresaw is shown
        too, and goes to the log. The end of the server is nobody's error.
        """
        if isinstance(error, ValueError | OSError):
            return str(error)
        if not self._closing.is_set():
            logging.getLogger(__name__).error("%s can't be shown", name, exc_info=error)
        return f"{type(error).__name__}: {error}"

    def _index_stamp(self, found: Mapping[str, StudyFolder]) -> str:
        """Return a stamp of the summaries: the list changes only once they have been made anew."""
        return hash_stamps(
            f"{name} {self._summaries.stamp(name)}"
            + ("" if self._summaries.last(name) else f" {self._outlines.stamp(name)}")
            for name in found
        )

    def _refresh(self, found: Mapping[str, StudyFolder]) -> threading.Thread:
        """Return the one thread that makes the summaries that are due, started if need be."""
        with self._starting:
            due = [each for each in found.values() if self._summaries.is_due(each)]
            if due and not self._reader.is_alive() and not self._closing.is_set():
                # a daemon: Ctrl-C does not wait for it
                self._reader = threading.Thread(target=self._read_all, args=[due], daemon=True)
                self._reader.start()
            elif not self._reader.ident:
                self._reader.start()  # nothing to do, and over at once
            return self._reader

    def _read_all(self, due: Sequence[StudyFolder]) -> None:
        try:
            self._summarise_all(due)
        except RuntimeError:  # no pool of threads begins anything while Python ends
            if not self._closing.is_set():
                raise

    def _summarise_all(self, due: Sequence[StudyFolder]) -> None:
        # what a person asks first is how far the studies are, and that is read in milliseconds
        unknown = [each for each in due if self._summaries.last(each.name) is None]
        stored = [each for each in unknown if self._stored(each)]
        with ExitStack() as stack:
            count = self._start_helpers(stack, len(unknown) - len(stored))
            for folder in stored:
                self._make(self._summaries, folder)
            for folder in unknown:
                if self._summaries.last(folder.name) is None:
                    self._make(self._outlines, folder)
            pool = stack.enter_context(ThreadPoolExecutor(1 + count))
            list(pool.map(lambda folder: self._make(self._summaries, folder), due))

    def _make(self, cache: StudyCache[Summary], folder: StudyFolder) -> None:
        if not self._closing.is_set():
            cache.get(folder)

    def _start_helpers(self, stack: ExitStack, studies: int) -> int:
        """Start the processes that so many studies are worth, until `stack` ends; return how many.

        This process reads as well.
        """
        self._helpers = SimpleQueue()
        wanted = min(os.cpu_count() or 1, MOST_PROCESSES, studies // WORTH_A_PROCESS) - 1
        with suppress(OSError):  # no more processes: this one reads it all
            for _ in range(wanted):
                self._helpers.put(stack.enter_context(ReaderProcess(read_summary)))
        return self._helpers.qsize()

    def _outline(self, folder: StudyFolder, _: Summary | None) -> Summary:
        try:
            _check(folder)
            if folder.kind == "study":
                return outline_of_study(read_study(folder.path, has_logs=False))
            return summary_of_probe(read_probe(folder.path))
        except Exception as error:
            return summary_of_error(folder.name, self._message(folder.name, error))

    def _stored(self, folder: StudyFolder) -> Summary | None:
        is_allowed = self._store and folder.kind == "study" and not folder.error
        return self._store.find(folder) if self._store and is_allowed else None

    def _summarise(self, folder: StudyFolder, _: Summary | None) -> Summary:
        try:
            if folder.kind == "study":
                return self._stored(folder) or self._computed(folder)
            _check(folder)
            return summary_of_probe(read_probe(folder.path))
        except Exception as error:
            return summary_of_error(folder.name, self._message(folder.name, error))

    def _computed(self, folder: StudyFolder) -> Summary:
        _check(folder)
        try:
            helper = self._helpers.get_nowait()
        except Empty:
            summary = summary_of_study(self._studies.get(folder))
        else:
            try:
                summary = helper.read(folder.path)
            finally:
                self._helpers.put(helper)
        if self._store:
            self._store.keep(folder, summary)
        return summary

    def _render(self, folder: StudyFolder, _: str | None) -> str:
        if folder.kind == "study":
            study = self._studies.get(folder)
            return render(study, ladder_of(study), stamp=folder.stamp)
        _check(folder)
        return render_probe(read_probe(folder.path), folder.stamp)


def address_of(name: str) -> str:
    """Return where the server shows the study or probe of that name."""
    return f"/study/{quote(name, safe='')}/"


def unreadable_page(title: str, error: str, stamp: str) -> str:
    """Return a page that says `error` until the records change; `stamp` is as in `fill`."""
    return fill("unreadable.html.j2", charts=[], sections=[], stamp=stamp, title=title, error=error)


def _read(folder: StudyFolder, earlier: RecordedStudy | None) -> RecordedStudy:
    _check(folder)
    return read_study(folder.path, known=earlier)


def _check(folder: StudyFolder) -> None:
    if folder.error:
        raise ValueError(folder.error)
