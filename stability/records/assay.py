"""What planted faults have shown on a candidate, on record: `runs/<study>/assay/<arm>.json`.

The file holds the raw figures, look by look, so that the limits of a policy can be applied to them
by whoever reads it. It names its parents: the SHA-256 of each snapshot whose weights the faults
were tried on, as the run's manifest lists it, and of the sources that computed the attention.
The run's manifest lists the file in turn, so that another one in its place is found out. Leaves out
the measuring (`study.assay`) and whether a fault was found (`analysis.assay`).
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict

from stability.records.paths import StudyPaths
from stability.records.record_types import Count, Number
from stability.records.sealed_json import file_checksum, jsonable, read_record, write_sealed

__all__ = [
    "LISTED",
    "STAGES",
    "AssayRecord",
    "FaultRecord",
    "fault_of",
    "is_listed",
    "read_assay",
    "sources_of",
    "unplanted",
    "write_assay",
]

LISTED = "assay"
"""The hash of a run's manifest that is the SHA-256 of the file."""

STAGES = (3, 6, 12, 24, 48, 96)
"""Numbers of looks at the gradient at which a fault may be found, so that few are taken for most;
where a run has fewer batches its last look takes the place of the next stage."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultRecord:
    """The figures of one fault; a level at which it was not tried has none."""

    name: str
    what: str
    levels: tuple[str, ...]
    """The levels at which it must be found."""
    operator: Mapping[str, Mapping[str, tuple[float, ...]]]
    """By result (`dq`), then metric (`gain`): a value for each look and layer."""
    ratios: tuple[float, ...] = ()
    """Of the errors of the whole model's gradient over the baseline's, one a look."""
    share: float = math.nan
    """Of the error's energy that is the same at every look."""
    share_se: float = math.nan
    share_looks: int = 0
    own_ratios: tuple[float, ...] = ()
    """These figures of the candidate as it is, without the fault, at the same looks."""
    own_share: float = math.nan
    own_share_se: float = math.nan
    error: str = ""
    """Why it could not be tried, or not at as many looks as it needs; mostly empty."""


def unplanted(why: str) -> FaultRecord:
    """Return the `own` figures of a candidate on which no fault could be planted."""
    return FaultRecord(name="", what="no fault", levels=(), operator={}, error=why)


@dataclass(frozen=True, kw_only=True, slots=True)
class AssayRecord:
    """All that was tried on one candidate."""

    arm: str
    seed: int
    parents: Mapping[str, str]
    """SHA-256 of each snapshot by its name below the run's folder."""
    own: FaultRecord
    """The candidate's own figures at the operator, with no fault; its `error` says why no fault
    could be planted at all."""
    faults: tuple[FaultRecord, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    """`sources_of` what the faults were planted with; empty in records of an older version."""
    stages: tuple[int, ...] = STAGES
    """The STAGES of the version that made it; empty in records of an older one."""

    def is_of(self, resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
        """Whether it was made with the sources of a manifest; an older record does not say."""
        return not self.sources or dict(self.sources) == sources_of(resolved, environment)


_OF_COMMANDS = ("command", "deterministic", "models", "names", "ranks", "start")
"""What says with what a command trains. All else on record of it may be another in each seed, as a
variable, a file's time, the weights in which a rank ends: `analysis.launch_contract` and
`analysis.start_contract` compare it within a seed."""


def sources_of(resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of an attention as it was resolved, and that of the attention library.

    The arguments are those fields of a run's manifest. An attention of one's own has the SHA-256 of
    its file in its description. Of a run that the recorder made, `_OF_COMMANDS` are its attention.
    """
    if "launched" in resolved or "command" in resolved:
        resolved = {name: resolved[name] for name in _OF_COMMANDS if name in resolved}
    described = json.dumps(resolved, sort_keys=True).encode()
    return {
        "attention": hashlib.sha256(described).hexdigest(),
        "kernel_source": environment.get("kernel_source", ""),
    }


class _Figures(TypedDict):
    """Of one result, a value for each look and layer."""

    error_ratio: list[Number]
    gain: list[Number]
    golden_bias_ulp: list[Number]


class _FaultValues(TypedDict):
    name: str
    what: str
    levels: list[str]
    operator: dict[str, _Figures]
    ratios: list[Number]
    share: Number
    share_se: Number
    share_looks: Count
    own_ratios: NotRequired[list[Number]]
    own_share: NotRequired[Number]
    own_share_se: NotRequired[Number]
    error: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    arm: str
    seed: Count
    parents: dict[str, str]
    own: _FaultValues
    faults: list[_FaultValues]
    sources: dict[str, str] = field(default_factory=dict)
    stages: list[Count] = field(default_factory=list)


def write_assay(study: Path, record: AssayRecord) -> Path:
    """Write the assay of an arm below the study's folder, whole or not at all."""
    path = StudyPaths(study).assay(record.arm)
    write_sealed(path, jsonable(asdict(record)))
    return path


def read_assay(study: Path, arm: str) -> AssayRecord | None:
    """Return the assay of an arm as it was written; None if there is no file.

    ValueError, one line that names the file, for one that is damaged or is no such record.
    """
    path = StudyPaths(study).assay(arm)
    if not path.exists():
        return None
    content = read_record(path, _File, writer="`stability run`", kind="assay")
    return AssayRecord(
        arm=content.arm,
        seed=content.seed,
        parents=content.parents,
        own=fault_of(content.own),
        faults=tuple(fault_of(entry) for entry in content.faults),
        sources=content.sources,
        stages=tuple(content.stages),
    )


def is_listed(study: Path, arm: str, hashes: Mapping[str, str]) -> bool:
    """Whether the file is the one that a run's manifest lists in `hashes`; older ones list none."""
    return hashes.get(LISTED) in (None, file_checksum(StudyPaths(study).assay(arm)))


_METRICS: tuple[Literal["error_ratio", "gain", "golden_bias_ulp"], ...] = (
    "error_ratio",
    "gain",
    "golden_bias_ulp",
)


def fault_of(entry: Mapping[str, Any]) -> FaultRecord:
    """Return the figures of a fault from their JSON values."""
    return FaultRecord(
        name=entry["name"],
        what=entry["what"],
        levels=tuple(entry["levels"]),
        # "nan" and "inf" stand as text in JSON
        operator={
            result: {metric: _numbers(metrics[metric]) for metric in _METRICS}
            for result, metrics in entry["operator"].items()
        },
        ratios=_numbers(entry["ratios"]),
        share=float(entry["share"]),
        share_se=float(entry["share_se"]),
        share_looks=entry["share_looks"],
        # a record of an older version has none
        own_ratios=_numbers(entry.get("own_ratios", ())),
        own_share=float(entry.get("own_share", math.nan)),
        own_share_se=float(entry.get("own_share_se", math.nan)),
        error=entry["error"],
    )


def _numbers(values: Iterable[Number]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
