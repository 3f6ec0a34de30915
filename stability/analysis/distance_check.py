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
from stability.analysis.study_distances import study_distances
from stability.analysis.study_records import RecordedRun, RecordedStudy
from stability.records.distances import DistanceMatrix
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.run_files import file_damage, predictions_of, snapshot_of
from stability.records.snapshots import read_snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["other_distances"]

TOLERANCE = 1e-9
"""Relative: both are summed in FP64, in two orders."""


def other_distances(study: RecordedStudy, *, every: bool = False) -> list[str]:
    """Return a sentence for each seed's record that is damaged, or says what the files do not.

    Of each seed one distance of weights and one of predictions is computed anew, drawn at random;
    all of them with `every`.
    """
    found = []
    for seed in study.seeds:
        where = StudyPaths(study.folder).distances(seed)
        try:
            distances = study_distances(study, [seed])[seed]
        except ValueError as error:
            found.append(str(error))
            continue
        for what, matrices, file in (
            ("weights", distances.weights, snapshot_of),
            ("predictions", distances.predictions, predictions_of),
        ):
            pairs = [
                (step, *two) for step, x in matrices.items() for two in combinations(x.arms, 2)
            ]
            chosen = pairs if every or not pairs else [random.SystemRandom().choice(pairs)]
            for step, one, other in chosen:
                said = _wrong(study, seed, matrices[step], (step, one, other), file)
                if said:
                    found.append(f"{where}: the distance of {what} {said}")
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
    value = _distance(read_snapshot(files[0]), read_snapshot(files[1]), is_mean=is_mean)
    if matrix.parents[arms[0]] == matrix.parents[arms[1]]:
        value = 0.0
    if (math.isnan(told) and math.isnan(value)) or math.isclose(told, value, rel_tol=TOLERANCE):
        return ""
    return f"between {arms[0]} and {arms[1]} at step {step} is {told}, {value} from the files"


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


def _distance(a: "dict[str, Tensor]", b: "dict[str, Tensor]", *, is_mean: bool) -> float:
    names = [name for name, x in a.items() if x.is_floating_point()]
    squares = math.fsum(
        float((a[n].double() - b[n].double()).square().sum()) for n in names if n in b
    )
    count = sum(a[name].numel() for name in names) if is_mean else 1
    return math.sqrt(squares / max(1, count)) if not math.isnan(squares) else math.nan
