"""Which values of a seed's weights are left out of E at a step: those that noise moves.

It is a function of the baseline and its nudges, by their snapshots of the start and of the step;
no other arm is seen. What an arm does to these values is told, and keeps it from holding where E of
all weights is surely beyond the limit. Leaves out the rule (`metrics.noise_moved`), the record
(`records.distances`) and when it is made (`study.distances`).
"""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stability.analysis.excess import Excess, excess_at, excess_over_seeds
from stability.analysis.number_text import three_figures
from stability.config.schema import BASELINE
from stability.records.distances import DistanceMatrix
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths
from stability.records.run_files import file_damage, snapshot_of

if TYPE_CHECKING:
    from torch import Tensor

    from stability.metrics.noise_moved import Ranges

__all__ = ["NOISE", "excess_of_all", "noise_moved_at", "sentence_of_left_out"]

NOISE = 0.1
"""Values are moved by noise if nudges send them elsewhere by more than this part of their way."""

Runs = Mapping[str, tuple[RunPaths, Manifest]]
"""A seed's runs by arm."""


def noise_moved_at(runs: Runs, step: int) -> "dict[str, Ranges] | None":
    """Return by name the ranges of values that noise has moved by `step`; empty without a nudge.

    None if a snapshot that it takes is not there: of the baseline and each nudge the one of step 0,
    and of those that list one of `step` that one.
    """
    from stability.metrics.noise_moved import noise_moved  # heavy: torch

    found = {}
    nudges = [arm for arm, (_, manifest) in runs.items() if manifest.role == "nudge"]
    for arm in (BASELINE, *nudges):
        if arm not in runs:
            return None
        paths, manifest = runs[arm]
        if paths.name_of(snapshot_of(paths, manifest, step)) not in manifest.all_files:
            if arm == BASELINE:
                return None
            continue
        start, end = (_vectors(paths, manifest, of) for of in (0, step))
        if start is None or end is None:
            return None
        found[arm] = start, end
    baseline = found.pop(BASELINE)
    return noise_moved(baseline, list(found.values()), NOISE)


def _vectors(paths: RunPaths, manifest: Manifest, step: int) -> "dict[str, Tensor] | None":
    """Return a snapshot's floating-point tensors of one dimension; None if it is not whole."""
    from stability.records.weight_files import open_snapshot  # heavy: torch

    path = snapshot_of(paths, manifest, step)
    if file_damage(paths, manifest, path):
        return None
    opened = open_snapshot(path)
    shapes, kinds = opened.shapes, opened.dtypes
    return {
        name: opened[name]
        for name in opened
        if len(shapes[name]) == 1 and kinds[name].is_floating_point
    }


def excess_of_all(
    weights: Mapping[int, DistanceMatrix], arm: str, reference: str, limit: float, alpha: float
) -> Excess | None:
    """Return the excess of all weights over seeds; None where nothing is left out, or it has none.

    `weights` are the distances at the judged step, by seed; `limit` and `alpha` are as of
    `excess_over_seeds`.
    """
    if not any(matrix.left_out for matrix in weights.values()):
        return None
    found = {s: excess_at(x, arm, reference, of_all=True) or 0.0 for s, x in weights.items()}
    if not all(0 < value < math.inf for value in found.values()):
        return None
    return excess_over_seeds(found, limit, alpha)


def sentence_of_left_out(weights: Mapping[int, DistanceMatrix], of_all: Excess | None) -> str:
    """Return a sentence that names what is left out, with a blank before it; empty if nothing is.

    `of_all` is the excess with it.
    """
    most = max(weights.values(), key=lambda matrix: matrix.left_out_values, default=None)
    if most is None or not most.left_out:
        return ""
    names = list(most.left_out)
    count = f"{most.left_out_values:,} value{'s' if most.left_out_values > 1 else ''}"
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    said = f" Left out are {count} that noise alone moves, in {names[0]}{more}"
    return f"{said}: with them it is {three_figures(of_all.mean)}." if of_all else f"{said}."
