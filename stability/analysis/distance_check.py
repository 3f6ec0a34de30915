"""Whether the distances on record between a study's arms are those of the files on disk.

The verdict rests on them. Those whose parents are other files now are left out by every reader, and
so here. Leaves out how they are measured (`study.distances`).
"""

import math
import random
from collections.abc import Callable, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from stability.analysis.drift_parents import is_kept
from stability.analysis.left_out import noise_moved_at
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.records.distances import DistanceMatrix
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import leaves_out
from stability.records.run_files import file_damage, predictions_of, snapshot_of
from stability.records.snapshots import read_snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["other_distances"]

TOLERANCE = 1e-9
"""Relative: both are summed in FP64, in two orders."""
KEPT, LEFT = ", less what is left out,", ", of what is left out,"


def other_distances(study: RecordedStudy, *, every: bool = False) -> list[str]:
    """Return a sentence for each seed's record that is damaged, or says what the files do not.

    Of each seed one distance of weights and one of predictions is computed anew, drawn at random,
    and which values are left out there; all of them with `every`.
    """
    found = []
    for seed in study.seeds:
        where = StudyPaths(study.folder).distances(seed)
        try:
            distances = study_distances(study, [seed])[seed]
        except ValueError as error:
            found.append(str(error))
            continue
        asked: set[int] = set()
        for what, matrices, file in (
            ("weights", distances.weights, snapshot_of),
            ("predictions", distances.predictions, predictions_of),
        ):
            pairs = [
                (step, *two) for step, x in matrices.items() for two in combinations(x.arms, 2)
            ]
            chosen = pairs if every or not pairs else [random.SystemRandom().choice(pairs)]
            asked |= {step for step, *_ in chosen} if file is snapshot_of else set()
            for step, one, other in chosen:
                said = _wrong(study, seed, matrices[step], (step, one, other), file)
                if said:
                    found.append(f"{where}: the distance of {what} {said}")
                    break
        for step in sorted(asked):
            said = _otherwise_left_out(study, seed, distances.weights[step], step)
            if said:
                found.append(f"{where}: {said}")
                break
    return found


def _wrong(
    study: RecordedStudy,
    seed: int,
    matrix: DistanceMatrix,
    pair: tuple[int, str, str],
    file: Callable[[RunPaths, Manifest, int], Path],
) -> str:
    step, *arms = pair
    runs = [arm.runs[seed] for name in arms if (arm := study.arm(name))]
    listed = [(run.paths, run.manifest) for run in runs if run.manifest]
    files = [file(*each, step) for each in listed]
    whole = len(files) == len(runs) and not any(
        file_damage(*each, path) for each, path in zip(listed, files, strict=True)
    )
    told = matrix.between(*arms)
    is_mean = file is predictions_of
    if told is not None and not is_mean and _was_dropped(runs, step):
        return _not_as_sketched(runs, step, matrix, arms)
    if not whole or told is None:
        return ""  # damage is told of by its pair
    own, others = (read_snapshot(path) for path in files)
    is_same = matrix.parents[arms[0]] == matrix.parents[arms[1]]
    lengths = (0.0, 0.0, 0.0) if is_same else _lengths(own, others, matrix)
    count = sum(x.numel() for x in own.values() if x.is_floating_point()) if is_mean else 1
    tells_of = told, matrix.kept_between(*arms), matrix.left_between(*arms)
    for what, tells, length in zip(("", KEPT, LEFT), tells_of, lengths, strict=True):
        value = length / math.sqrt(max(1, count))
        if tells is None or (math.isnan(tells) and math.isnan(value)):
            continue
        if not math.isclose(tells, value, rel_tol=TOLERANCE):
            return (
                f"between {arms[0]} and {arms[1]} at step {step}{what} is {tells}, {value} from "
                "the files"
            )
    return ""


def _otherwise_left_out(study: RecordedStudy, seed: int, matrix: DistanceMatrix, step: int) -> str:
    """Return what is wrong with the values that are left out at a step; mostly nothing."""
    is_sealed, rule = StudyPaths(study.folder).protocol.exists(), leaves_out(study.folder)
    if is_sealed and not rule and matrix.left_out is not None:
        return f"at step {step} leaves values out, which the protocol does not know"
    if not (is_sealed and rule) and matrix.left_out is None:
        return ""  # an older record
    runs = {
        arm.name: (run.paths, run.manifest)
        for arm in study.arms
        if (run := arm.runs[seed]).manifest is not None
    }
    if any(arm.role == "nudge" and arm.name not in matrix.arms for arm in study.arms):
        return ""  # a nudge is refused, or has come since, which is told of by its pair
    found = noise_moved_at(runs, step, matrix)
    if found is None:
        return ""
    told = matrix.left_out.values if matrix.left_out else {}
    names = [name for name in {**told, **found[1]} if told.get(name) != found[1].get(name)]
    if matrix.left_out and not names:
        return ""
    name = next(iter(names), "")
    moved = _ranges(found[1].get(name, ()))
    where = f"of {name}, noise moves {moved} by the files" if name else ""
    return f"at step {step} leaves out {_ranges(told.get(name, ()))} {where or 'and was not asked'}"


def _ranges(found: Sequence[tuple[int, int]]) -> str:
    return ", ".join(f"values {begin} to {end - 1}" for begin, end in found) or "no values"


def _was_dropped(runs: Sequence[RecordedRun], step: int) -> bool:
    return any(run.manifest and not is_kept(run.paths, run.manifest, step) for run in runs)


def _not_as_sketched(
    runs: Sequence[RecordedRun], step: int, matrix: DistanceMatrix, arms: Sequence[str]
) -> str:
    """Return what is wrong with a distance whose snapshots were dropped; mostly nothing."""
    from stability.analysis.sketch_check import agrees, sketched_weights  # heavy: torch

    values = matrix.left_out.values if matrix.left_out else {}
    try:
        found = [sketched_weights(run.paths, run.manifest, step) for run in runs if run.manifest]
        one, other = (weights for weights in found if weights)
        estimates = one.distance(other), *one.parted_distance(other, values)
    except ValueError:
        return ""  # a sketch that is damaged is told of by its pair; one of another model says none
    tells = matrix.between(*arms), matrix.kept_between(*arms), matrix.left_between(*arms)
    for what, told, estimate in zip(("", KEPT, LEFT), tells, estimates, strict=True):
        if told is not None and not agrees(told, estimate, norm=one.sketch.norm):
            return (
                f"between {arms[0]} and {arms[1]} at step {step}{what} is {told}, {estimate:.4g} "
                "by the sketches"
            )
    return ""


def _lengths(
    a: "dict[str, Tensor]", b: "dict[str, Tensor]", matrix: DistanceMatrix
) -> tuple[float, float, float]:
    """Return the distance of two states, less what `matrix` leaves out, and of that alone."""
    left_out = matrix.left_out.values if matrix.left_out else {}
    squares: list[list[float]] = [[], [], []]
    for name in (name for name, x in a.items() if x.is_floating_point() and name in b):
        apart = a[name].double() - b[name].double()
        squares[0].append(float(apart.square().sum()))
        for begin, end in left_out.get(name, ()):
            squares[2].append(float(apart[begin:end].square().sum()))
            apart[begin:end] = 0
        squares[1].append(float(apart.square().sum()) if name in left_out else squares[0][-1])
    whole, kept, left = (math.sqrt(math.fsum(each)) for each in squares)
    return whole, kept, left
