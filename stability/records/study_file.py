"""The plan of a study on record, `runs/<study>/study.json`: its config as asked for, and its arms.

Leaves out what the config's values mean (`config.schema`): a reader of today shows studies of older
versions too, so only what every reader looks for has a type here.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from stability.records.paths import StudyPaths
from stability.records.record_types import FILLED, Count, Pair
from stability.records.sealed_json import read_record

__all__ = ["StudyArm", "StudyFile", "read_study_file"]


class StudyArm(TypedDict):
    """One arm, in the order of the study."""

    name: str
    axis: str
    diff: dict[str, Pair]
    """Config path -> [baseline's value, this arm's value]."""
    role: NotRequired[str]
    until: NotRequired[Count]


class _Train(TypedDict):
    steps: Count
    snapshot_steps: NotRequired[list[Count]]


class _Base(TypedDict):
    train: _Train
    precision: NotRequired[str]


class _Config(TypedDict):
    name: str
    question: str
    base: _Base
    seeds: Annotated[list[Count], FILLED]
    yardstick: NotRequired[str]
    early_step: NotRequired[Count]
    policy: NotRequired[dict[str, Any] | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyFile:
    """What `study.json` holds."""

    config: _Config
    arms: Annotated[list[StudyArm], FILLED]


def read_study_file(study: Path) -> StudyFile:
    """Return the plan of the study in a folder.

    ValueError, one line that names the file, if it is missing, damaged, or no such record.
    """
    return read_record(StudyPaths(study).study, StudyFile, writer="`stability run`", kind="study")
