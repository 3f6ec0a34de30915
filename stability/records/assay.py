"""What planted faults have shown on a candidate, on record: `runs/<study>/assay/<arm>.json`.

The file holds the raw figures, look by look, so that the limits of a policy can be applied to them
by whoever reads it. It names its parents: the SHA-256 of each snapshot whose weights the faults
were tried on, as the run's manifest lists it, and of the sources that computed the attention.
Leaves out the measuring (`study.assay`) and whether a fault was found (`analysis.assay`).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stability.records.paths import StudyPaths
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = ["AssayRecord", "FaultRecord", "read_assay", "sources_of", "write_assay"]


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
    error: str = ""
    """Why it could not be tried; mostly empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AssayRecord:
    """All that was tried on one candidate."""

    arm: str
    seed: int
    parents: Mapping[str, str]
    """SHA-256 of each snapshot by its name below the run's folder."""
    own: FaultRecord
    """The candidate's own figures at the operator, with no fault."""
    faults: tuple[FaultRecord, ...]
    sources: Mapping[str, str] = field(default_factory=dict)
    """`sources_of` what the faults were planted with; empty in records of an older version."""

    def is_of(self, resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> bool:
        """Whether it was made with the sources of a manifest; an older record does not say."""
        return not self.sources or dict(self.sources) == sources_of(resolved, environment)


def sources_of(resolved: Mapping[str, Any], environment: Mapping[str, Any]) -> dict[str, str]:
    """Return a hash of an attention as it was resolved, and that of the attention library.

    The arguments are those fields of a run's manifest. An attention of one's own has the SHA-256 of
    its file in its description.
    """
    described = json.dumps(resolved, sort_keys=True).encode()
    return {
        "attention": hashlib.sha256(described).hexdigest(),
        "kernel_source": environment.get("kernel_source", ""),
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    arm: str
    seed: int
    parents: dict[str, Any]
    own: dict[str, Any]
    faults: list[Any]
    sources: dict[str, str] = field(default_factory=dict)


def write_assay(study: Path, record: AssayRecord) -> Path:
    """Write the assay of an arm below the study's folder, whole or not at all."""
    path = StudyPaths(study).assay(record.arm)
    content = _File(
        arm=record.arm,
        seed=record.seed,
        parents=dict(record.parents),
        own=asdict(record.own),
        faults=[asdict(fault) for fault in record.faults],
        sources=dict(record.sources),
    )
    write_sealed(path, jsonable(asdict(content)))
    return path


def read_assay(study: Path, arm: str) -> AssayRecord | None:
    """Return the assay of an arm as it was written; None if there is no file.

    ValueError, one line that names the file, for one that is damaged or is no such record.
    """
    path = StudyPaths(study).assay(arm)
    if not path.exists():
        return None
    content = read_record(path, _File, writer="`stability run`", kind="assay")
    try:
        return AssayRecord(
            arm=content.arm,
            seed=content.seed,
            parents=content.parents,
            own=_fault(content.own),
            faults=tuple(_fault(entry) for entry in content.faults),
            sources=content.sources,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: must hold the figures of planted faults: {error!r}; remove it, and "
            "`stability run` makes it anew"
        ) from error


def _fault(entry: Mapping[str, Any]) -> FaultRecord:
    return FaultRecord(
        name=entry["name"],
        what=entry["what"],
        levels=tuple(entry["levels"]),
        # "nan" and "inf" stand as text in JSON
        operator={
            result: {metric: _numbers(values) for metric, values in metrics.items()}
            for result, metrics in entry["operator"].items()
        },
        ratios=_numbers(entry["ratios"]),
        share=float(entry["share"]),
        share_se=float(entry["share_se"]),
        share_looks=entry["share_looks"],
        error=entry["error"],
    )


def _numbers(values: list[Any]) -> tuple[float, ...]:
    return tuple(float(value) for value in values)
