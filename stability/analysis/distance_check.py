"""Whether the distances on record between a study's arms are those of the files on disk.

The verdict rests on them. Those whose parents are other files now are left out by every reader, and
so here. Leaves out how they are measured (`study.distances`).
"""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from stability.analysis.drift_parents import is_kept
from stability.analysis.left_out import noise_moved_at
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.config.schema import BASELINE
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
        return _not_as_sketched(runs, step, told, arms)
    if not whole or told is None:
        return ""  # damage is told of by its pair
    own, others = (read_snapshot(path) for path in files)
    is_same = matrix.parents[arms[0]] == matrix.parents[arms[1]]
    for tells, left_out in ((told, {}), (matrix.kept_between(*arms), matrix.left_out or {})):
        value = 0.0 if is_same else _distance(own, others, left_out, is_mean=is_mean)
        if tells is None or (math.isnan(tells) and math.isnan(value)):
            continue
        if not math.isclose(tells, value, rel_tol=TOLERANCE):
            less = ", less what is left out," if left_out else ""
            return (
                f"between {arms[0]} and {arms[1]} at step {step}{less} is {tells}, {value} from "
                "the files"
            )
    return ""


def _otherwise_left_out(study: RecordedStudy, seed: int, matrix: DistanceMatrix, step: int) -> str:
    """Return what is wrong with the values that are left out at a step; mostly nothing."""
    if matrix.left_out is None and not leaves_out(study.folder):
        return ""
    runs = {
        arm.name: (run.paths, run.manifest)
        for arm in study.arms
        if (run := arm.runs[seed]).manifest is not None
    }
    listing = {
        arm
        for arm, (paths, manifest) in runs.items()
        if manifest.role == "nudge"
        and paths.name_of(snapshot_of(paths, manifest, step)) in manifest.all_files
    }
    if not {BASELINE, *listing} <= {*matrix.arms}:
        return ""  # a nudge has come since: the next `stability run` asks it too
    told, found = matrix.left_out or {}, noise_moved_at(runs, step)
    if found is None or found == told:
        return ""
    name = next(name for name in {**told, **found} if told.get(name) != found.get(name))
    return (
        f"at step {step} leaves out values {told.get(name, 'none')} of {name}, by the files noise "
        f"moves {found.get(name, 'none')}"
    )


def _was_dropped(runs: Sequence[RecordedRun], step: int) -> bool:
    return any(run.manifest and not is_kept(run.paths, run.manifest, step) for run in runs)


def _not_as_sketched(
    runs: Sequence[RecordedRun], step: int, told: float, arms: Sequence[str]
) -> str:
    """Return what is wrong with a distance whose snapshots were dropped; mostly nothing."""
    from stability.analysis.sketch_check import agrees, sketched_weights  # heavy: torch

    try:
        found = [sketched_weights(run.paths, run.manifest, step) for run in runs if run.manifest]
        one, other = (weights for weights in found if weights)
        estimate = one.distance(other)
    except ValueError:
        return ""  # a sketch that is damaged is told of by its pair; one of another model says none
    if agrees(told, estimate, norm=one.sketch.norm):
        return ""
    return (
        f"between {arms[0]} and {arms[1]} at step {step} is {told}, {estimate:.4g} by the sketches"
    )


def _distance(
    a: "dict[str, Tensor]",
    b: "dict[str, Tensor]",
    left_out: Mapping[str, Sequence[tuple[int, int]]],
    *,
    is_mean: bool,
) -> float:
    names = [name for name, x in a.items() if x.is_floating_point()]
    squares = math.fsum(
        float(_apart(a[n], b[n], left_out.get(n, ())).square().sum()) for n in names if n in b
    )
    count = sum(a[name].numel() for name in names) if is_mean else 1
    return math.sqrt(squares / max(1, count)) if not math.isnan(squares) else math.nan


def _apart(a: "Tensor", b: "Tensor", left_out: Sequence[tuple[int, int]]) -> "Tensor":
    apart = a.double() - b.double()
    for begin, end in left_out:
        apart[begin:end] = 0
    return apart
