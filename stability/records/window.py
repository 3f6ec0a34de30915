"""The judged step, frozen: `runs/<study>/window.json`.

The record holds what the rule saw, the log excess of each control at each step with the files that
it came from, so that anybody can repeat the choice, and so that a control that was trained anew is
noticed. It is written once, at the first look, and later looks read it. Leaves out the rule
(`analysis.window`).
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from stability.records.paths import StudyPaths
from stability.records.record_types import Count, Number
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = ["WindowRecord", "read_window", "write_window"]


class ControlRow(TypedDict):
    """How far a control was from the baseline."""

    step: Count
    arm: str
    seed: Count
    log_excess: Number


class ParentsRow(TypedDict):
    """What the distances of a seed at a step were measured from."""

    seed: Count
    step: Count
    files: dict[str, str]
    """SHA-256 of the snapshots by arm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowRecord:
    """What the rule saw and the step that it picked, in JSON values."""

    step: Count
    """The judged step; 0 if there is none."""
    reason: str
    """Why this step, or why none."""
    limit: float
    """The largest |log E| of a control inside the window."""
    reference: str
    controls: list[str]
    seeds: list[Count]
    """The seeds of the look at which it was frozen."""
    log_excess: list[ControlRow]
    """A row for each step, control and seed."""
    parents: list[ParentsRow]
    """A row for each seed and step."""


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
    return read_record(path, WindowRecord, writer="`stability run`", kind="record of a window")
