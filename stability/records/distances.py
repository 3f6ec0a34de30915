"""Distances between the arms of a seed, on record: `runs/<study>/distances/seed-<n>.json`.

At each step with snapshots there is one matrix of distances between the weights of all arms that
have a snapshot there, and one between their predictions where those are kept. Every matrix names
its parents: the SHA-256 of each file that it was made from, as the run's manifest lists it. A
reader takes an arm's row only if that is still the manifest's, so that a run that was trained anew
is never judged by the weights of the one before. Leaves out the measuring (`study.distances`) and
what a distance means (`analysis`).
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal, NotRequired, TypedDict

from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.record_types import PAIR, Count, Number
from stability.records.run_files import predictions_of, snapshot_of
from stability.records.sealed_json import jsonable, read_record, write_sealed

__all__ = [
    "DistanceMatrix",
    "LeftOut",
    "SeedDistances",
    "read_distances",
    "with_parents",
    "write_distances",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class LeftOut:
    """What noise moves of several arms' weights at one step, and how far they are apart in it."""

    asked: tuple[str, ...]
    """The arms that it was found by: the baseline and its nudges."""
    values: Mapping[str, tuple[tuple[int, int], ...]]
    """Ranges of values of vectors, by name (`metrics.noise_moved`)."""
    kept_rows: tuple[tuple[float, ...], ...] = ()
    """Rows as of the matrix, of all but these values; NaN where a sketch lacks what it takes."""
    left_rows: tuple[tuple[float, ...], ...] = ()
    """Rows of these values alone, likewise. Both are empty if there are no values."""

    @property
    def count(self) -> int:
        """How many values are left out."""
        return sum(end - begin for ranges in self.values.values() for begin, end in ranges)

    def only(self, arms: Sequence[str], kept: Sequence[int]) -> "LeftOut | None":
        """Return it for the `kept` of `arms`; None if one that was asked is not among them."""
        if not {*self.asked} <= {arms[i] for i in kept}:
            return None
        return replace(
            self, kept_rows=_picked(self.kept_rows, kept), left_rows=_picked(self.left_rows, kept)
        )


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
    left_out: "LeftOut | None" = None
    """What is left out of E; None where that was not asked."""

    @property
    def arms(self) -> tuple[str, ...]:
        """The arms in the order of rows and columns."""
        return tuple(self.parents)

    def between(self, one: str, other: str) -> float | None:
        """Return the distance between two arms; None if one of them is not in the matrix."""
        if one not in self.parents or other not in self.parents:
            return None
        return self.rows[self.arms.index(one)][self.arms.index(other)]

    @property
    def judged_rows(self) -> tuple[tuple[float, ...], ...]:
        """The rows without what is left out."""
        return self.left_out.kept_rows if self.left_out and self.left_out.values else self.rows

    def kept_between(self, one: str, other: str) -> float | None:
        """Return the distance between two arms without what is left out.

        None as `between`, and where a sketch lacks what it takes.
        """
        whole = self.between(one, other)
        if whole is None or self.left_out is None or not self.left_out.values:
            return whole
        kept = self.left_out.kept_rows[self.arms.index(one)][self.arms.index(other)]
        return None if math.isnan(kept) and not math.isnan(whole) else kept

    def left_between(self, one: str, other: str) -> float | None:
        """Return the distance of what is left out; None as `kept_between`, and if nothing is."""
        if self.left_out is None or not self.left_out.values:
            return None
        if self.kept_between(one, other) is None:
            return None
        return self.left_out.left_rows[self.arms.index(one)][self.arms.index(other)]

    def only(self, keep: Callable[[str, str], bool]) -> "DistanceMatrix":
        """Return the matrix of the arms for which `keep(arm, parent)` holds."""
        kept = [i for i, (arm, parent) in enumerate(self.parents.items()) if keep(arm, parent)]
        arms = self.arms
        return DistanceMatrix(
            parents={arms[i]: self.parents[arms[i]] for i in kept},
            norms={arms[i]: self.norms[arms[i]] for i in kept},
            rows=_picked(self.rows, kept),
            sketched=tuple(pair for pair in self.sketched if {*pair} <= {arms[i] for i in kept}),
            left_out=self.left_out.only(arms, kept) if self.left_out else None,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedDistances:
    """All that is on record of one seed, by step."""

    seed: int
    weights: Mapping[int, DistanceMatrix] = field(default_factory=dict)
    """L2 distances of all weights, in FP64."""
    predictions: Mapping[int, DistanceMatrix] = field(default_factory=dict)
    """RMS distances of the token log-probabilities of the fixed held-out batch, in nats."""


class _LeftOutValues(TypedDict):
    asked: list[str]
    values: dict[str, list[Annotated[list[Count], PAIR]]]
    kept_rows: list[list[Number]]
    left_rows: list[list[Number]]


class _MatrixValues(TypedDict):
    parents: dict[str, str]
    norms: dict[str, Number]
    rows: list[list[Number]]
    sketched: NotRequired[list[Annotated[list[str], PAIR]]]
    left_out: NotRequired["_LeftOutValues"]


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


def _picked(
    rows: tuple[tuple[float, ...], ...], kept: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(rows[i][j] for j in kept) for i in kept) if rows else ()


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
            "asked": [*matrix.left_out.asked],
            "values": {
                name: [[*pair] for pair in ranges]
                for name, ranges in matrix.left_out.values.items()
            },
            "kept_rows": [[*row] for row in matrix.left_out.kept_rows],
            "left_rows": [[*row] for row in matrix.left_out.left_rows],
        }
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
    return DistanceMatrix(
        parents=dict(values["parents"]),
        norms={arm: float(values["norms"][arm]) for arm in values["parents"]},
        rows=rows,
        sketched=tuple((one, other) for one, other in values.get("sketched", ())),
        left_out=_left_out(values["left_out"], values["parents"], where)
        if "left_out" in values
        else None,
    )


def _left_out(values: _LeftOutValues, arms: Collection[str], where: str) -> LeftOut:
    if unknown := {*values["asked"]} - {*arms}:
        raise ValueError(f"{where} leaves values out by {min(unknown)}, which is none of its arms")
    for name, ranges in values["values"].items():
        edges = [edge for pair in ranges for edge in pair]
        if not edges or sorted({*edges}) != edges:
            raise ValueError(f"{where} leaves out of {name} {ranges}, which are no ranges")
    size = len(arms) if values["values"] else 0
    return LeftOut(
        asked=tuple(values["asked"]),
        values={
            name: tuple((begin, end) for begin, end in ranges)
            for name, ranges in values["values"].items()
        },
        kept_rows=_square(values["kept_rows"], size, f"{where}, less what is left out,"),
        left_rows=_square(values["left_rows"], size, f"{where}, of what is left out,"),
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
