"""Distances between the arms of a seed, on record: `runs/<study>/distances/seed-<n>.json`.

At each step with snapshots there is one matrix of distances between the weights of all arms that
have a snapshot there, and one between their predictions where those are kept. Every matrix names
its parents: the SHA-256 of each file that it was made from, as the run's manifest lists it. A
reader takes an arm's row only if that is still the manifest's, so that a run that was trained anew
is never judged by the weights of the one before. Leaves out the measuring (`study.distances`) and
what a distance means (`analysis`).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.record_types import PAIR, Count, Number
from stability.records.run_files import predictions_of, snapshot_of
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = [
    "DistanceMatrix",
    "SeedDistances",
    "read_distances",
    "with_parents",
    "write_distances",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class DistanceMatrix:
    """The distances between every two of several arms at one step."""

    parents: Mapping[str, str]
    """SHA-256 of the file that each arm's values came from, by arm, in the order of the rows."""
    norms: Mapping[str, float]
    """How far each arm is from zero, in the same unit."""
    rows: tuple[tuple[float, ...], ...]
    """Symmetric, zeros on the diagonal; NaN to an arm that holds a NaN."""
    sketched: tuple[tuple[str, str], ...] = ()
    """Pairs whose distance is that of their sketches: a snapshot had been dropped."""
    left_out: Mapping[str, tuple[tuple[int, int], ...]] | None = None
    """Which values of which vectors noise moves (`metrics.noise_moved`): ranges by name. None where
    that was not asked."""
    kept_rows: tuple[tuple[float, ...], ...] = ()
    """The distances of what is not left out; empty if nothing is. A sketch has none: a NaN."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms in the order of rows and columns."""
        return tuple(self.parents)

    def between(self, one: str, other: str) -> float | None:
        """Return the distance between two arms; None if one of them is not in the matrix."""
        if one not in self.parents or other not in self.parents:
            return None
        return self.rows[self.arms.index(one)][self.arms.index(other)]

    def kept_between(self, one: str, other: str) -> float | None:
        """Return the distance between two arms without what is left out.

        None as `between`, and where it would have to be that of their sketches.
        """
        if not self.left_out or one not in self.parents or other not in self.parents:
            return self.between(one, other)
        if (one, other) in self.sketched or (other, one) in self.sketched:
            return None
        return self.kept_rows[self.arms.index(one)][self.arms.index(other)]

    @property
    def left_out_values(self) -> int:
        """How many values are left out."""
        ranges = (self.left_out or {}).values()
        return sum(end - begin for each in ranges for begin, end in each)

    def only(self, keep: Callable[[str, str], bool]) -> "DistanceMatrix":
        """Return the matrix of the arms for which `keep(arm, parent)` holds."""
        kept = [i for i, (arm, parent) in enumerate(self.parents.items()) if keep(arm, parent)]
        arms = self.arms
        return DistanceMatrix(
            parents={arms[i]: self.parents[arms[i]] for i in kept},
            norms={arms[i]: self.norms[arms[i]] for i in kept},
            rows=tuple(tuple(self.rows[i][j] for j in kept) for i in kept),
            sketched=tuple(pair for pair in self.sketched if {*pair} <= {arms[i] for i in kept}),
            left_out=self.left_out,
            kept_rows=tuple(tuple(self.kept_rows[i][j] for j in kept) for i in kept)
            if self.left_out
            else (),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedDistances:
    """All that is on record of one seed, by step."""

    seed: int
    weights: Mapping[int, DistanceMatrix] = field(default_factory=dict)
    """L2 distances of all weights, in FP64."""
    predictions: Mapping[int, DistanceMatrix] = field(default_factory=dict)
    """RMS distances of the token log-probabilities of the fixed held-out batch, in nats."""


class _MatrixValues(TypedDict):
    parents: dict[str, str]
    norms: dict[str, Number]
    rows: list[list[Number]]
    sketched: NotRequired[list[Annotated[list[str], PAIR]]]
    left_out: NotRequired[dict[str, list[Annotated[list[Count], PAIR]]]]
    kept_rows: NotRequired[list[list[Number]]]


class _StepValues(TypedDict):
    step: Count
    weights: _MatrixValues | None
    predictions: _MatrixValues | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """What the file holds, in JSON values."""

    seed: Count
    steps: list[_StepValues]


def write_distances(study: Path, distances: SeedDistances) -> Path:
    """Write the distances of a seed below the study's folder, whole or not at all."""
    path = StudyPaths(study).distances(distances.seed)
    steps = sorted({*distances.weights, *distances.predictions})
    values: list[_StepValues] = [
        {
            "step": step,
            "weights": _matrix_values(distances.weights.get(step)),
            "predictions": _matrix_values(distances.predictions.get(step)),
        }
        for step in steps
    ]
    content = _File(seed=distances.seed, steps=values)
    write_sealed(path, jsonable(asdict(content)))
    return path


def read_distances(study: Path, seed: int) -> SeedDistances:
    """Return the distances of a seed as they were written; empty if there is no file.

    ValueError, one line that names the file, for one that is damaged or is no such record.
    """
    path = StudyPaths(study).distances(seed)
    if not path.exists():
        return SeedDistances(seed=seed)
    content = read_record(path, _File, writer="`stability run`", kind="record of distances")
    try:
        if content.seed != seed:
            raise ValueError(f"is of seed {content.seed}")
        return SeedDistances(
            seed=seed,
            weights=_matrices(content.steps, "weights"),
            predictions=_matrices(content.steps, "predictions"),
        )
    except ValueError as error:
        raise ValueError(
            f"{path}: must hold symmetric matrices of distances by step: {error}; "
            "`stability run` makes it anew"
        ) from error


def with_parents(
    distances: SeedDistances, runs: Mapping[str, tuple[RunPaths, Manifest]]
) -> SeedDistances:
    """Return the rows whose parents are the files that the manifests of `runs` list, by arm."""

    def checked(
        matrices: Mapping[int, DistanceMatrix], file: Callable[[RunPaths, Manifest, int], Path]
    ) -> dict[int, DistanceMatrix]:
        def listed(arm: str, step: int) -> str | None:
            if arm not in runs:
                return None
            paths, manifest = runs[arm]
            return manifest.all_files.get(paths.name_of(file(paths, manifest, step)))

        found = {
            step: matrix.only(lambda arm, parent, step=step: listed(arm, step) == parent)
            for step, matrix in matrices.items()
        }
        return {step: matrix for step, matrix in found.items() if matrix.arms}

    return SeedDistances(
        seed=distances.seed,
        weights=checked(distances.weights, snapshot_of),
        predictions=checked(distances.predictions, predictions_of),
    )


def _matrix_values(matrix: DistanceMatrix | None) -> _MatrixValues | None:
    if matrix is None:
        return None
    values = _MatrixValues(
        parents=dict(matrix.parents),
        norms={**matrix.norms},
        rows=[[*row] for row in matrix.rows],
    )
    if matrix.sketched:
        values["sketched"] = [[*pair] for pair in matrix.sketched]
    if matrix.left_out is not None:
        values["left_out"] = {
            name: [[*pair] for pair in ranges] for name, ranges in matrix.left_out.items()
        }
    if matrix.left_out:
        values["kept_rows"] = [[*row] for row in matrix.kept_rows]
    return values


def _matrices(
    steps: list[_StepValues], what: Literal["weights", "predictions"]
) -> dict[int, DistanceMatrix]:
    return {
        entry["step"]: _matrix(values, f"{what} at step {entry['step']}")
        for entry in steps
        if (values := entry[what]) is not None
    }


def _matrix(values: _MatrixValues, where: str) -> DistanceMatrix:
    size = len(values["parents"])
    rows = _square(values["rows"], size, where)
    lacking = values["parents"].keys() - values["norms"].keys()
    if lacking:
        raise ValueError(f"{where} has no norm of {min(lacking)}")
    left_out = None
    if "left_out" in values:
        left_out = {
            name: tuple((begin, end) for begin, end in ranges)
            for name, ranges in values["left_out"].items()
        }
    kept = values.get("kept_rows", [])
    return DistanceMatrix(
        parents=dict(values["parents"]),
        norms={arm: float(values["norms"][arm]) for arm in values["parents"]},
        rows=rows,
        sketched=tuple((one, other) for one, other in values.get("sketched", ())),
        left_out=left_out,
        kept_rows=_square(kept, size, f"{where}, less what is left out,") if left_out else (),
    )


def _square(values: list[list[Number]], size: int, where: str) -> tuple[tuple[float, ...], ...]:
    # "nan" and "inf" stand as text in JSON
    rows = tuple(tuple(float(value) for value in row) for row in values)
    square = len(rows) == size and all(len(row) == size for row in rows)
    if not square or not all(
        rows[i][i] == 0 and all(_same(rows[i][j], rows[j][i]) for j in range(i))
        for i in range(size)
    ):
        raise ValueError(f"{where} is not square and symmetric with zeros on its diagonal")
    return rows


def _same(one: float, other: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other))
