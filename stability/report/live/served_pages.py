"""The pages of all studies below one folder, made when asked for and kept until records change.

Safe to call from several threads. Leaves out HTTP (`server`) and the pages themselves (`html`,
`probe_page`, `compare_page`).
"""

import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from urllib.parse import quote

from stability.analysis.ladder import ladder_of
from stability.analysis.probe_records import read_probe
from stability.analysis.study_records import RecordedStudy, read_study
from stability.report.live.cache import Kept
from stability.report.live.study_index import Found, find_studies, stamp_of_all
from stability.report.live.study_summary import (
    Summary,
    summary_of_error,
    summary_of_probe,
    summary_of_study,
)
from stability.report.page.compare_page import render_comparison
from stability.report.page.html import fill, render, render_probe

__all__ = ["ServedPages", "address_of", "unreadable_page"]

PATIENCE = 1.0
"""Seconds that the list of studies waits for those that have not been read yet."""
PAGES = 6
"""Studies whose records and pages are kept in memory."""
SUMMARIES = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class _Listed:
    """A study in the list; `summary` is None until it has been read."""

    name: str
    address: str
    newest: float
    newest_text: str
    summary: Summary | None


class ServedPages:
    """Finds the studies below `root` anew at each call; a page of one is made by one thread."""

    def __init__(self, root: Path) -> None:
        self._root = root.resolve()
        self._studies = Kept(_read, PAGES)
        self._pages = Kept(self._render, PAGES)
        self._summaries = Kept(self._summarise, SUMMARIES)
        self._reader = threading.Thread()
        self._starting = threading.Lock()

    def find(self) -> dict[str, Found]:
        """Return the studies and probes by name, the newest first."""
        return find_studies(self._root)

    def index(self) -> str:
        """Return the list of all studies; those not read within PATIENCE follow by themselves."""
        found = self.find()
        self._refresh(found).join(PATIENCE)
        stamp = self._index_stamp(found)
        listed = [
            _Listed(
                name=each.name,
                address=address_of(each.name),
                newest=each.newest,
                newest_text=f"{datetime.fromtimestamp(each.newest):%Y-%m-%d %H:%M}",
                summary=self._summaries.last(each.name),
            )
            for each in found.values()
        ]
        folder = self._root.name or str(self._root)
        return fill(
            "index.html.j2", charts=[], sections=[], stamp=stamp, folder=folder, studies=listed
        )

    def index_stamp(self) -> str:
        """Return a stamp of the list as it would be shown now; has what has changed read."""
        found = self.find()
        self._refresh(found)
        return self._index_stamp(found)

    def study(self, found: Found) -> str:
        """Return the page of one study or probe, or what keeps it from being read."""
        try:
            return self._pages.get(found)
        except Exception as error:
            return unreadable_page(found.name, _said(found.name, error), found.stamp)

    def comparison(self, chosen: Sequence[Found], stamp: str) -> str:
        """Return the page on several studies, or what keeps one of them from being read."""
        addresses = {found.name: address_of(found.name) for found in chosen}
        try:
            studies = {found.name: self._studies.get(found) for found in chosen}
            return render_comparison(studies, addresses, stamp)
        except Exception as error:
            names = ", ".join(addresses)
            return unreadable_page(names, _said(names, error), stamp)

    def _index_stamp(self, found: Mapping[str, Found]) -> str:
        """Return a stamp of the summaries: a list is new only once they have been made anew."""
        return stamp_of_all(f"{name} {self._summaries.stamp(name)}" for name in found)

    def _refresh(self, found: Mapping[str, Found]) -> threading.Thread:
        """Have the summaries that are due made by one thread, and return it."""
        with self._starting:
            due = [each for each in found.values() if self._summaries.is_due(each)]
            if due and not self._reader.is_alive():
                # a daemon: Ctrl-C does not wait for it
                self._reader = threading.Thread(target=self._read_all, args=[due], daemon=True)
                self._reader.start()
            elif not self._reader.ident:
                self._reader.start()  # nothing to do, and over at once
            return self._reader

    def _read_all(self, due: Sequence[Found]) -> None:
        for found in due:
            self._summaries.get(found)

    def _summarise(self, found: Found, _: Summary | None) -> Summary:
        try:
            if found.kind == "study":
                return summary_of_study(self._studies.get(found))
            _check(found)
            return summary_of_probe(read_probe(found.folder))
        except Exception as error:
            return summary_of_error(found.name, _said(found.name, error))

    def _render(self, found: Found, _: str | None) -> str:
        if found.kind == "study":
            study = self._studies.get(found)
            return render(study, ladder_of(study), stamp=found.stamp)
        _check(found)
        return render_probe(read_probe(found.folder), found.stamp)


def address_of(name: str) -> str:
    """Return where the server shows the study or probe of that name."""
    return f"/study/{quote(name, safe='')}/"


def unreadable_page(title: str, error: str, stamp: str) -> str:
    """Return a page that says `error` and looks out for newer records; `stamp` as in `fill`."""
    return fill("unreadable.html.j2", charts=[], sections=[], stamp=stamp, title=title, error=error)


def _read(found: Found, earlier: RecordedStudy | None) -> RecordedStudy:
    _check(found)
    return read_study(found.folder, known=earlier)


def _check(found: Found) -> None:
    if found.error:
        raise ValueError(found.error)


def _said(name: str, error: Exception) -> str:
    """Return what is wrong with a study's records.

    One study must not take away the others' pages, so an error that nobody foresaw is caught too;
    it goes to the log.
    """
    if isinstance(error, ValueError | OSError):
        return str(error)
    logging.getLogger(__name__).error("%s can't be shown", name, exc_info=error)
    return f"{type(error).__name__}: {error}"
