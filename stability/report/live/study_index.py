"""The studies and probes below a folder: where they are, how new, and a stamp of their records.

Whoever shows studies looks a name up among these and never makes a path of it, so that nothing
outside the folder can be asked for. Leaves out what the records say (`analysis`).
"""

import hashlib
import os
import re
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stability.records.paths import RunPaths, StudyPaths
from stability.records.plain_files import read_plain
from stability.records.probe_record import METRICS_FILE, PROBE_FILE
from stability.records.run_lock import is_held
from stability.records.waterfall_record import WATERFALLS

__all__ = ["StudyFolder", "StudyIndex", "find_studies", "hash_stamps"]

DEPTH = 3
"""How many folders below the searched one a study may lie."""
_STUDY, _RUN = StudyPaths(Path()), RunPaths(Path())
STUDY_FILE, MANIFEST = _STUDY.study.name, _RUN.manifest.name
STUDY_FILES = {path.name for path in (_STUDY.study, _STUDY.protocol, _STUDY.window)}
STUDY_FOLDERS = {
    path.parent.name for path in (_STUDY.distances(0), _STUDY.drifts(0), _STUDY.assay(""))
}
"""An arm may be called so too, and share the folder."""
RUN_FILES = {MANIFEST, _RUN.metrics.name}
SEED = re.compile(r"seed-\d+")
RUNNING = b'"state": "running"'
"""How `sealed_json` writes it."""

Kind = Literal["study", "probe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFolder:
    """A study or a probe on disk, as it is at one moment."""

    name: str
    """Its path below the folder that was searched; that folder's own name if it is the study."""
    path: Path
    kind: Kind
    stamp: str
    """A hash of the records' status: it changes whenever one of them does, or when a run loses or
    gets its process."""
    newest: float
    """When the newest record was written, in seconds since 1970."""
    error: str
    """Why its records must not be read; mostly empty."""


class StudyIndex:
    """Looks for the studies in `root` and at most DEPTH folders below it, again and again.

    Hidden folders, and links that lead out of `root`, are not searched. A look asks for the
    directories and the status of each record, and reads a manifest only once for each state of it.
    Safe to call from several threads.
    """

    def __init__(self, root: Path) -> None:
        self._root = str(root.resolve())
        self._claims: dict[str, tuple[str, bool]] = {}

    def find(self) -> dict[str, StudyFolder]:
        """Return studies and probes by name, the newest first."""
        found = [self._look_at(folder, kind) for folder, kind in self._search(self._root, DEPTH)]
        newest_first = sorted(found, key=lambda each: (-each.newest, each.name))
        return {each.name: each for each in newest_first}

    def _search(self, folder: str, depth: int) -> Iterator[tuple[str, Kind]]:
        if os.path.lexists(f"{folder}/{STUDY_FILE}"):
            yield folder, "study"
        elif os.path.lexists(f"{folder}/{PROBE_FILE}"):
            yield folder, "probe"
        elif depth:
            for child in _entries(folder):
                if child.name[0] != "." and child.is_dir() and self._is_inside(child):
                    yield from self._search(child.path, depth - 1)

    def _is_inside(self, entry: os.DirEntry[str]) -> bool:
        """Whether an entry of a folder inside the root lies inside, too."""
        # what is no link lies where its folder does
        return not entry.is_symlink() or Path(entry.path).resolve().is_relative_to(self._root)

    def _look_at(self, folder: str, kind: Kind) -> StudyFolder:
        lines, newest, error = [], 0.0, ""
        records = _records_of_study(folder) if kind == "study" else _records_of_probe(folder)
        for links, record in records:
            try:
                status = record.stat()
            except OSError:  # gone by now, or a link to nothing
                continue
            if not all(map(self._is_inside, links)):
                error = f"{record.path} leads out of {self._root}: it is not read"
            line = f"{record.path[len(folder) :]} {_stamp(status)}"
            if record.name == MANIFEST and stat.S_ISREG(status.st_mode) and not error:
                line += " has a process" if self._is_running(record.path, line) else ""
            lines.append(line)
            newest = max(newest, status.st_mtime)
        name = os.path.relpath(folder, self._root) if folder != self._root else Path(folder).name
        return StudyFolder(
            name=_as_utf8(name),
            path=Path(folder),
            kind=kind,
            stamp=hash_stamps(map(_as_utf8, lines)),
            newest=newest,
            error=error,
        )

    def _is_running(self, manifest: str, stamp: str) -> bool:
        """Whether a process trains a run: one that is killed leaves every record as it was."""
        known = self._claims.get(manifest)
        if known is None or known[0] != stamp:
            known = self._claims[manifest] = (stamp, _says_running(manifest))
        return known[1] and is_held(RunPaths(Path(manifest).parent))


def find_studies(root: Path) -> dict[str, StudyFolder]:
    """Return what `StudyIndex` finds at one look."""
    return StudyIndex(root).find()


def hash_stamps(stamps: Iterable[str]) -> str:
    """Return a hash of an ordered list of stamps."""
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:20]


def _entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder by name; nothing if it is gone, or not ours to read."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entries, key=lambda each: each.name)
    except OSError:
        return []


def _stamp(status: os.stat_result) -> str:
    # the time of a change can't be set, as that of writing can: a copy keeps the latter
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns} {status.st_ino}"


def _says_running(manifest: str) -> bool:
    """Whether a manifest may say that its run is in training; it is not parsed."""
    try:
        return RUNNING in read_plain(Path(manifest))
    except OSError:
        return False


def _as_utf8(name: str) -> str:
    # a file system may hold names that are no text, which a page can't show
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


_Record = tuple[tuple[os.DirEntry[str], ...], os.DirEntry[str]]
"""A record's file, behind it and the folders on the way to it: what may be a link."""


def _records_of_probe(folder: str) -> Iterator[_Record]:
    for entry in _entries(folder):
        if entry.name in (PROBE_FILE, METRICS_FILE):
            yield (entry,), entry


def _records_of_study(folder: str) -> Iterator[_Record]:
    """Give all that a page or a verdict is made of, but for snapshots, which are not read."""
    for entry in _entries(folder):
        if entry.name in STUDY_FILES:
            yield (entry,), entry
        elif entry.is_dir():
            for child in _entries(entry.path):
                if entry.name in STUDY_FOLDERS and child.name.endswith(".json"):
                    yield (entry, child), child
                elif SEED.fullmatch(child.name) and child.is_dir():
                    yield from _records_of_run((entry, child))


def _records_of_run(way: tuple[os.DirEntry[str], ...]) -> Iterator[_Record]:
    for entry in _entries(way[-1].path):
        if entry.name in RUN_FILES:
            yield (*way, entry), entry
        elif entry.name == WATERFALLS:
            for file in _entries(entry.path):
                if file.name.endswith(".json"):
                    yield (*way, entry, file), file
