"""Summaries on disk: what took seconds to compute is not computed again by the next dashboard.

A summary counts for one state of a study's records (`StudyFolder.stamp`) and for one state of the
code that made it. The records stay the truth: the store may be deleted at any time, and what is in
it and can't be used is made anew. It belongs to the account that runs the dashboard and lies with
the other caches in its home, since the studies may be somebody else's. Leaves out how a summary is
made (`study_summary`).
"""

import functools
import hashlib
import os
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import attention_kernels
import stability
from stability.records.atomic_files import DiskFullError
from stability.records.identity import hash_sources
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.live.study_index import StudyFolder
from stability.report.live.study_summary import Mark, SmallLadder, SmallRung, Summary

__all__ = ["SummaryStore", "default_folder"]

MOST = 2000
"""How many summaries are kept, of a few kilobytes each."""


def default_folder() -> Path:
    """Return the folder of the store in this account's caches."""
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not caches.is_absolute():
        caches = Path.home() / ".cache"
    return caches / "stability" / "summaries"


class SummaryStore:
    """The summaries in a folder, which is made when the first one is kept."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, study: StudyFolder) -> Summary | None:
        """Return the summary of a study as its records are now; None if there is none."""
        path = self._path(study)
        if not path.is_file():
            return None
        try:
            content = read_sealed(path, writer="the dashboard")
            return _summary(content["summary"]) if content["of"] == _of(study) else None
        except (ValueError, KeyError, TypeError):  # damaged, or of another version
            return None

    def keep(self, study: StudyFolder, summary: Summary) -> None:
        """Keep a summary for the next dashboard, if the disk takes it."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_sealed(self._path(study), {"of": _of(study), "summary": asdict(summary)})
            self._drop_oldest()
        except (OSError, DiskFullError):
            return  # the next one computes it

    def _drop_oldest(self) -> None:
        kept = list(self._folder.glob("*.json"))
        if len(kept) > MOST:
            for path in sorted(kept, key=lambda each: each.stat().st_mtime)[: len(kept) - MOST]:
                path.unlink(missing_ok=True)

    def _path(self, study: StudyFolder) -> Path:
        name = hashlib.sha256(os.fsencode(study.path)).hexdigest()[:32]
        return self._folder / f"{name}.json"


def _of(study: StudyFolder) -> dict[str, str]:
    return {"stamp": study.stamp, "code": _code()}


@functools.cache
def _code() -> str:
    """Return a hash of the sources of both packages and of what they compute with."""
    packages = (Path(str(package.__file__)).parent for package in (stability, attention_kernels))
    versions = map(metadata.version, ("numpy", "scipy"))
    return " ".join([*map(hash_sources, packages), *versions])


def _summary(content: Mapping[str, Any]) -> Summary:
    ladder = content["ladder"]
    parts = {
        "answers": tuple(content["answers"]),
        "ladder": ladder and SmallLadder(**{**ladder, "rungs": tuple(map(_rung, ladder["rungs"]))}),
    }
    return Summary(**{**content, **parts})


def _rung(content: Mapping[str, Any]) -> SmallRung:
    marks = {name: content[name] and Mark(**content[name]) for name in ("early", "last")}
    return SmallRung(**{**content, **marks})
