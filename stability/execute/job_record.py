"""The ids of a study's jobs on disk, `jobs/slurm.json`, so that a later command finds them again.

An entry is written before its jobs are submitted and again once their id is known: who is killed in
between leaves a name by which the queue finds the jobs, if they are there. Leaves out the state of
a job, which only the queue knows.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypedDict

from stability.records.paths import RunPaths, StudyPaths
from stability.records.record_types import Count
from stability.records.run_lock import hold
from stability.records.sealed_json import read_record, write_sealed

__all__ = ["JobArray", "array_of", "read_arrays", "submitting", "write_arrays"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobArray:
    """Jobs of one arm, one a seed."""

    name: str
    """Its name in the queue, which no other jobs have."""
    arm: str
    """Empty for the job that follows the runs."""
    seeds: tuple[int, ...]
    id: str = ""
    """The queue's; empty until it is known."""
    submitted: str = ""
    """When, in ISO 8601."""

    def id_of(self, seed: int) -> str:
        """Return the id of the job of a seed, as Slurm writes it."""
        return f"{self.id}_{self.seeds.index(seed)}" if len(self.seeds) > 1 else self.id


class _Entry(TypedDict):
    name: str
    arm: str
    seeds: list[Count]
    id: str
    submitted: str


@dataclass(frozen=True, kw_only=True, slots=True)
class _SlurmJobs:
    arrays: list[_Entry]


def array_of(arrays: list[JobArray], arm: str, seed: int) -> JobArray | None:
    """Return the array that was submitted last for a run; None for none."""
    return next((each for each in reversed(arrays) if each.arm == arm and seed in each.seeds), None)


def read_arrays(study: Path) -> list[JobArray]:
    """Return the arrays of the study in a folder, in the order of submission; none without a file.

    ValueError, one line that names the file, if it is damaged.
    """
    path = _path(study)
    if not path.exists():
        return []
    found = read_record(path, _SlurmJobs, writer="`stability run --executor slurm`")
    return [JobArray(**{**entry, "seeds": tuple(entry["seeds"])}) for entry in found.arrays]


def write_arrays(study: Path, arrays: list[JobArray]) -> None:
    """Write down the arrays that are the last of some run, whole or not at all."""
    kept = [x for x in arrays if any(array_of(arrays, x.arm, seed) is x for seed in x.seeds)]
    write_sealed(_path(study), {"arrays": [asdict(each) for each in kept]})


@contextmanager
def submitting(study: Path) -> Iterator[None]:
    """Let no other process submit jobs of the study; ValueError if one does."""
    try:
        with hold(RunPaths(StudyPaths(study).jobs)):
            yield
    except BlockingIOError:
        raise ValueError(
            f"{study}: another process submits jobs of this study; wait for it"
        ) from None


def _path(study: Path) -> Path:
    return StudyPaths(study).jobs / "slurm.json"
