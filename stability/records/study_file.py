"""The plan of a study on record, `runs/<study>/study.json`: its config as asked for, and its arms.

Leaves out what the config's values mean (`config.schema`): a reader of today shows studies of older
versions too, so only what every reader looks for has a type here.
"""

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

from stability.records.paths import StudyPaths
from stability.records.record_types import FILLED, Count, Pair
from stability.records.sealed_json import read_record

__all__ = ["StudyArm", "StudyFile", "read_study_file", "studies_near"]

MOST_NAMED = 3
"""How many studies are named to who has named none."""


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
    path = StudyPaths(study).study
    writer = "`stability run`"
    near = "" if path.exists() else studies_near(study)
    near = f"; {near}" if near else ""
    if not study.is_dir():
        got = "a file" if study.exists() else "no such folder"
        raise ValueError(
            f"{study}: must be the folder of a study, got {got}; {writer} makes one{near}"
        )
    if near:
        raise ValueError(f"{path}: there is no such file; {writer} writes it{near}")
    return read_record(path, StudyFile, writer=writer, kind="study")


def studies_near(folder: Path) -> str:
    """Return in words which studies may have been meant by a folder that is none; "" for none.

    Those in it, the one that it is a part of, and the one of that name in `runs`; else those of a
    name like it in `runs` or beside it.
    """
    runs = Path("runs")
    around = [runs / folder.name, *folder.parents[:3]]
    found = [each for each in around if StudyPaths(each).study.is_file()]
    found += sorted(path.parent for path in folder.glob("*/study.json"))
    if not found:
        others = {
            study.parent.name: study.parent
            for place in (runs, folder.parent)
            for study in place.glob("*/study.json")
        }
        alike = difflib.get_close_matches(folder.name, others, cutoff=0.6)
        found = [others[name] for name in alike]
    more = f" and {len(found) - MOST_NAMED} more" if len(found) > MOST_NAMED else ""
    return f"nearest: {', '.join(map(str, found[:MOST_NAMED]))}{more}" if found else ""
