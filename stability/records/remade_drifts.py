"""Drifts that were computed anew from snapshots: `runs/<study>/drifts/seed-<n>.json`.

A run's log is never written again once the run has ended. Where its drifts are stale, because the
baseline was trained anew, or say nothing of what they were computed from, they are computed from
the snapshots and stand here, each with the checksums of both. Leaves out which drifts are wanted
(`analysis.drift_parents`) and the computing (`study.remade_drifts`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypedDict

from stability.records.metric_names import DRIFTS
from stability.records.paths import StudyPaths
from stability.records.record_types import PAIR, Count, Number
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = ["RemadeDrifts", "read_remade", "write_remade"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RemadeDrifts:
    """The drifts of one arm's weights after `step` updates."""

    arm: str
    step: int
    parents: tuple[str, str]
    """SHA-256 of the run's own snapshot and of the baseline's."""
    drifts: Mapping[str, float]
    """By the names that they have in a log."""


class _Row(TypedDict):
    arm: str
    step: Count
    parents: Annotated[list[str], PAIR]
    drifts: dict[str, Number]


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    seed: Count
    rows: list[_Row]


def write_remade(study: Path, seed: int, rows: Iterable[RemadeDrifts]) -> Path:
    """Write all that was computed anew of a seed, whole or not at all."""
    path = StudyPaths(study).drifts(seed)
    write_sealed(path, jsonable({"seed": seed, "rows": [asdict(row) for row in rows]}))
    return path


def read_remade(study: Path, seed: int) -> list[RemadeDrifts]:
    """Return what was computed anew of a seed; none if there is no file.

    ValueError, one line that names the file, for one that is damaged or is no such record.
    """
    path = StudyPaths(study).drifts(seed)
    if not path.exists():
        return []
    content = read_record(path, _File, writer="`stability run`", kind="record of drifts")
    try:
        if content.seed != seed:
            raise ValueError(f"is of seed {content.seed}")
        return [_drifts(row) for row in content.rows]
    except ValueError as error:
        raise ValueError(
            f"{path}: must hold drifts by arm and step: {error}; `stability run` makes it anew"
        ) from error


def _drifts(row: _Row) -> RemadeDrifts:
    strange = [name for name in row["drifts"] if not name.startswith(DRIFTS)]
    if strange:
        raise ValueError(f"{strange[0]!r} is no drift")
    of, origin = row["parents"]
    # "nan" and "inf" stand as text in JSON
    values = {name: float(value) for name, value in row["drifts"].items()}
    return RemadeDrifts(arm=row["arm"], step=row["step"], parents=(of, origin), drifts=values)
