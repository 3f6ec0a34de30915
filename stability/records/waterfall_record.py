"""Waterfalls on record: how much of an attention's error each of its rounding points makes.

A waterfall is one sealed file, `<run>/waterfalls/<profile>-layer_<n>-step-<step>-<hash>.json`. The
hash covers everything else that was chosen, so the same waterfall always has the same file, and
another one never shares it. Leaves out the measuring (`probe.microbenchmark`) and how it is shown.
"""

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypedDict

from stability.records.paths import RunPaths
from stability.records.record_types import Count, Pair
from stability.records.sealed_json import read_record, write_sealed

__all__ = [
    "CHANGES",
    "WATERFALLS",
    "WaterfallPoint",
    "WaterfallRecord",
    "WaterfallStep",
    "read_waterfalls",
    "waterfall_files",
    "write_waterfall",
]

WATERFALLS = "waterfalls"
"""The folder of a run's waterfalls."""
CHANGES = ("none", "lowered", "raised")
"""A step is the profile as it is, or has one point lowered to its format, or raised to FP64."""


class WaterfallStep(TypedDict):
    """One change of the profile and what came of it."""

    change: Literal["none", "lowered", "raised"]
    point: str
    format: str
    errors: dict[str, float]
    """Relative, by result."""


class WaterfallPoint(TypedDict, total=False):
    """What is read of all that was chosen."""

    changes: list[Pair]
    """A field of the profile's numerics and what it was set to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaterfallRecord:
    """One waterfall, in JSON values."""

    profile: str
    format: str
    """The format of q, k and v, and of the points that the profile leaves to them."""
    layer: Count
    step: Count
    """Updates made when the weights were taken."""
    point: WaterfallPoint
    """All that was chosen: mask, scale, shapes, changes."""
    numerics: dict[str, Any]
    steps: list[WaterfallStep]
    versions: dict[str, str]

    @property
    def name(self) -> str:
        """The profile with what was changed in it, the layer and the step, for people."""
        changes = (f"{name}={value}" for name, value in self.point.get("changes", ()))
        return f"{' '.join([self.profile, *changes])}, layer {self.layer}, step {self.step}"


def write_waterfall(run: RunPaths, record: WaterfallRecord) -> Path:
    """Write `record` into the folder of `run`, whole or not at all, and return its file."""
    chosen = json.dumps([record.point, record.numerics], sort_keys=True)
    profile = re.sub(r"[^A-Za-z0-9_]+", "_", record.profile)[:64]
    digest = hashlib.sha256(chosen.encode()).hexdigest()[:8]
    name = f"{profile}-layer_{record.layer}-step-{record.step:08d}-{digest}.json"
    path = run.root / WATERFALLS / name
    write_sealed(path, asdict(record))
    return path


def read_waterfalls(paths: Iterable[RunPaths]) -> list[tuple[RunPaths, WaterfallRecord]]:
    """Return the waterfalls of runs, each with its run: in the runs' order, then by file name.

    ValueError, one line that names the file, for one that is damaged or is no waterfall.
    """
    return [(run, _read(path)) for run in paths for path in waterfall_files(run)]


def waterfall_files(run: RunPaths) -> list[Path]:
    """Return the files of a run's waterfalls by name, unread."""
    return sorted((run.root / WATERFALLS).glob("*.json"))


def _read(path: Path) -> WaterfallRecord:
    record = read_record(path, WaterfallRecord, writer="`stability deviate --record`")
    if not _are_whole(record.steps):
        raise ValueError(
            f"{path}: steps must be one as it is, and each point lowered and raised, with errors "
            "of the same results"
        )
    return record


def _are_whole(steps: list[WaterfallStep]) -> bool:
    """Whether the points lowered are those raised, in one order, and results are alike."""
    points = {change: [s["point"] for s in steps if s["change"] == change] for change in CHANGES}
    return (
        len(points["none"]) == 1
        and points["lowered"] == points["raised"]
        and len({tuple(step["errors"]) for step in steps}) == 1
    )
