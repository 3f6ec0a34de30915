"""The judged step, frozen: `runs/<study>/window.json`.

The record holds what the rule saw, the log excess of each control at each step with the files that
it came from, so that anybody can repeat the choice, and so that a control that was trained anew is
noticed. It is written once, at the first look, and later looks read it. Leaves out the rule
(`analysis.window`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stability.records.paths import StudyPaths
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = ["WindowRecord", "read_window", "write_window"]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRecord:
    """What the rule saw and the step that it picked, in JSON values."""

    step: int
    """The judged step; 0 if there is none."""
    reason: str
    """Why this step, or why none."""
    limit: float
    """The largest |log E| of a control inside the window."""
    reference: str
    controls: list[str]
    seeds: list[int]
    """The seeds of the look at which it was frozen."""
    log_excess: list[dict[str, Any]]
    """A row for each step, control and seed: `step`, `arm`, `seed`, `log_excess`."""
    parents: list[dict[str, Any]]
    """SHA-256 of the snapshots by arm, for each seed and step: `seed`, `step`, `files`."""


def write_window(study: Path, record: WindowRecord) -> Path:
    """Write the record below the study's folder, whole or not at all."""
    path = StudyPaths(study).window
    write_sealed(path, jsonable(asdict(record)))
    return path


def read_window(study: Path) -> WindowRecord | None:
    """Return the frozen window; None where none is frozen yet.

    ValueError, one line that names the file, for one that is damaged or is no such record.
    """
    path = StudyPaths(study).window
    if not path.exists():
        return None
    record = read_record(path, WindowRecord, writer="`stability run`", kind="record of a window")
    rows = {"step", "arm", "seed", "log_excess"}
    parents = {"seed", "step", "files"}
    if not all(_has(row, rows) for row in record.log_excess) or not all(
        _has(row, parents) and isinstance(row["files"], dict) for row in record.parents
    ):
        raise ValueError(
            f"{path}: log_excess must hold {', '.join(sorted(rows))}, and parents "
            f"{', '.join(sorted(parents))}; it is no whole record of a window"
        )
    return record


def _has(row: Any, keys: set[str]) -> bool:
    return isinstance(row, Mapping) and row.keys() == keys
