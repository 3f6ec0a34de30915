"""The studies and probes below a folder: where they are, how new, and a stamp of their records.

Whoever shows studies looks a name up among these and never makes a path of it, so that nothing
outside the folder can be asked for. Leaves out what the records say (`analysis`).
"""

import hashlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stability.records.paths import StudyPaths, list_runs
from stability.records.probe_record import METRICS_FILE, PROBE_FILE
from stability.records.waterfall_record import waterfall_files

__all__ = ["StudyFolder", "find_studies", "hash_stamps"]

DEPTH = 3
"""How many folders below the searched one a study may lie."""

Kind = Literal["study", "probe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFolder:
    """A study or a probe on disk, as it is at one moment."""

    name: str
    """Its path below the folder that was searched; that folder's own name if it is the study."""
    path: Path
    kind: Kind
    stamp: str
    """A hash of the sizes and times of the records: it changes whenever one of them does."""
    newest: float
    """When the newest record was written, in seconds since 1970."""
    error: str
    """Why its records must not be read; mostly empty."""


def find_studies(root: Path) -> dict[str, StudyFolder]:
    """Return what lies in `root` or at most DEPTH folders below it by name, the newest first.

    Hidden folders, and links that lead out of `root`, are not searched.
    """
    root = root.resolve()
    found = [_look_at(folder, kind, root) for folder, kind in _search(root, root, DEPTH)]
    newest_first = sorted(found, key=lambda each: (-each.newest, each.name))
    return {each.name: each for each in newest_first}


def hash_stamps(stamps: Iterable[str]) -> str:
    """Return a hash of an ordered list of stamps."""
    return hashlib.sha256("\n".join(stamps).encode()).hexdigest()[:20]


def _search(folder: Path, root: Path, depth: int) -> Iterator[tuple[Path, Kind]]:
    if os.path.lexists(StudyPaths(folder).study):
        yield folder, "study"
    elif os.path.lexists(folder / PROBE_FILE):
        yield folder, "probe"
    elif depth:
        for child in _folders_in(folder):
            if child.resolve().is_relative_to(root):
                yield from _search(child, root, depth - 1)


def _folders_in(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            names = [each.name for each in entries if each.is_dir()]
    except OSError:  # not ours to read, or gone by now
        return []
    return [folder / name for name in sorted(names) if not name.startswith(".")]


def _look_at(folder: Path, kind: Kind, root: Path) -> StudyFolder:
    lines, newest, error = [], 0.0, ""
    for path in _records(folder, kind):
        try:
            status = path.stat()
        except OSError:  # not there yet, or gone by now
            continue
        if not path.resolve().is_relative_to(root):
            error = f"{path} leads out of {root}: it is not read"
        lines.append(f"{path.relative_to(folder)} {status.st_size} {status.st_mtime_ns}")
        newest = max(newest, status.st_mtime)
    name = folder.relative_to(root).as_posix() if folder != root else root.name
    return StudyFolder(
        name=_as_utf8(name),
        path=folder,
        kind=kind,
        stamp=hash_stamps(map(_as_utf8, lines)),
        newest=newest,
        error=error,
    )


def _as_utf8(name: str) -> str:
    # a file system may hold names that are no text, which a page can't show
    return name.encode("utf-8", "backslashreplace").decode("utf-8")


def _records(folder: Path, kind: Kind) -> Iterator[Path]:
    if kind == "probe":
        yield folder / PROBE_FILE
        yield folder / METRICS_FILE
        return
    yield StudyPaths(folder).study
    for run in list_runs(folder):
        yield run.manifest
        yield run.metrics
        yield from waterfall_files(run)
