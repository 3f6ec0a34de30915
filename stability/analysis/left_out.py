"""Which values of a seed's weights are left out of E at a step: those that noise moves.

It is a function of the baseline and its nudges, by their vectors at the start and at the step; no
other arm is seen. What an arm does to these values is judged apart: noise makes it uncertain, so
that the limit is wider. Leaves out the rule's arithmetic (`metrics.noise_moved`), the record
(`records.distances`) and when it is made (`study.distances`).
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from stability.analysis.excess import Excess, excess_over_seeds
from stability.analysis.number_text import bounds, three_figures
from stability.analysis.sequential import LOOKS
from stability.analysis.sketch_check import sketched_weights
from stability.config.schema import BASELINE
from stability.config.study import PolicyConfig
from stability.records.distances import DistanceMatrix
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import leaves_out
from stability.records.run_files import file_damage, snapshot_of

if TYPE_CHECKING:
    from torch import Tensor

    from stability.metrics.noise_moved import Ranges

__all__ = [
    "RULE",
    "excess_of_left_out",
    "judges_all",
    "limit_of_left_out",
    "noise_moved_at",
    "sentence_of_left_out",
    "why_unasked",
]

RULE = {"part": 0.3, "times": 3.0, "block": 16, "limit": 2.0}
"""Values are left out in blocks of `block` that nudges send elsewhere by more than a `part` of
their way, and `times` as far as an average weight. Of them alone E may be up to `limit`, or up to
the policy's where that is wider."""

Runs = Mapping[str, tuple[RunPaths, Manifest]]
"""A seed's runs by arm."""


def noise_moved_at(
    runs: Runs, step: int, matrix: DistanceMatrix
) -> "tuple[tuple[str, ...], dict[str, Ranges]] | None":
    """Return which arms were asked, and by name the ranges of values that noise has moved.

    `matrix` has the distances at the step. None without a nudge in it, and where vectors are not on
    record: of the baseline and each nudge those of step 0 and of `step`, in a sketch or a snapshot.
    """
    from stability.metrics.noise_moved import noise_moved  # heavy: torch

    asked = [arm for arm in matrix.arms if arm in runs and runs[arm][1].role == "nudge"]
    if not asked or BASELINE not in matrix.arms or BASELINE not in runs:
        return None
    found = []
    for arm in (BASELINE, *asked):
        start, end = (_vectors(*runs[arm], of) for of in (0, step))
        if start is None or end is None:
            return None
        found.append((start, end))
    squares = [(matrix.between(arm, BASELINE) or 0.0) ** 2 for arm in asked]
    values = _values(*runs[BASELINE])
    if not values or not math.isfinite(sum(squares)):
        return None
    ranges = noise_moved(
        found[0],
        found[1:],
        part=RULE["part"],
        least=RULE["times"] * math.sqrt(math.fsum(squares) / len(squares) / values),
        block=int(RULE["block"]),
    )
    return (BASELINE, *asked), ranges


def _vectors(paths: RunPaths, manifest: Manifest, step: int) -> "dict[str, Tensor] | None":
    """Return the weights of one dimension; None if neither sketch nor snapshot has them whole."""
    from stability.metrics.noise_moved import vector_names  # heavy: torch
    from stability.records.weight_files import open_snapshot

    try:
        sketched = sketched_weights(paths, manifest, step)
    except ValueError:  # damaged: it is told of elsewhere
        sketched = None
    if sketched is not None and sketched.vectors is not None:
        return dict(sketched.vectors)
    path = snapshot_of(paths, manifest, step)
    if file_damage(paths, manifest, path):
        return None
    opened = open_snapshot(path)
    shapes = {name: opened.shapes[name] for name, x in opened.dtypes.items() if x.is_floating_point}
    return {name: opened[name] for name in vector_names(shapes)}


def _values(paths: RunPaths, manifest: Manifest) -> int:
    """Return how many weights a run has, by its snapshot of step 0; 0 if that is not there."""
    from stability.records.weight_files import open_snapshot  # heavy: torch

    try:
        opened = open_snapshot(snapshot_of(paths, manifest, 0))
    except ValueError:  # it is missing, or damaged, which is told of elsewhere
        return 0
    kinds = opened.dtypes
    return sum(math.prod(x) for name, x in opened.shapes.items() if kinds[name].is_floating_point)


def limit_of_left_out(policy: PolicyConfig) -> float:
    """Return the largest E that what is left out may have."""
    return max(RULE["limit"], policy.max_excess)


def judges_all(folder: Path, weights: Mapping[int, DistanceMatrix], seeds: Sequence[int]) -> bool:
    """Whether E of a study is of all weights: not all seeds can be judged without any.

    `weights` are the distances at the judged step, by seed. Runs that were recorded one by one,
    perhaps by two versions, or adopted without a start, may not have been asked. Where values are
    left out in less seeds than a look has, no interval says what became of them.
    """
    if not StudyPaths(folder).protocol.exists() and any(
        matrix.left_out is None for matrix in weights.values()
    ):
        return True
    found = [seed for seed, x in weights.items() if x.left_out and x.left_out.values]
    return len(found) < min(LOOKS[0], len(seeds))


def why_unasked(
    folder: Path, step: int, weights: Mapping[int, DistanceMatrix]
) -> tuple[str, str] | tuple[()]:
    """Return why seeds of a sealed study are not judged by its rule, and what to do; or nothing."""
    if not StudyPaths(folder).protocol.exists():
        return ()
    rule = leaves_out(folder)
    other = [seed for seed, matrix in weights.items() if (matrix.left_out is not None) != rule]
    if not other:
        return ()
    if not rule:
        return (
            f"values are left out at step {step} with seed {other[0]}, which the protocol does not "
            "know"
        ), "remove `distances` and run `stability run`"
    return (
        f"what noise moves is not known at step {step} with seed {other[0]}: a nudge has no "
        "weights there, or their vectors are not on record"
    ), "run `stability run`, which asks again; where a nudge is lost, name an earlier step"


def excess_of_left_out(
    weights: Mapping[int, DistanceMatrix], arm: str, reference: str, limit: float, alpha: float
) -> Excess | None:
    """Return the excess of what is left out, over the seeds in which anything is; None if nothing.

    `weights` are the distances at the judged step, by seed; `limit` and `alpha` are as of
    `excess_over_seeds`. A seed in which the arm or the baseline is the reference's there says
    nothing of noise, and is not counted.
    """
    found = {}
    for seed, matrix in weights.items():
        own, unit = (matrix.left_between(x, reference) for x in (arm, BASELINE))
        if own and unit and math.isfinite(own / unit):
            found[seed] = own / unit
    return excess_over_seeds(found, limit, alpha) if found else None


def sentence_of_left_out(
    weights: Mapping[int, DistanceMatrix], apart: Excess | None, limit: float
) -> str:
    """Return a sentence that names what is left out, with a blank before it; empty if nothing is.

    `apart` is the excess of these values alone, and `limit` the largest that it may be.
    """
    found = [x.left_out for x in weights.values() if x.left_out and x.left_out.values]
    if not found:
        return ""
    counts = sorted({x.count for x in found})
    many = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    names = list(dict.fromkeys(name for x in found for name in x.values))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    part = "" if len(found) == len(weights) else f" in {len(found)} of {len(weights)} seeds"
    said = f" Left out are {many} values that noise moves, in {names[0]}{more}{part}"
    if apart is None:
        return f"{said}."
    bracket = bounds(apart.low, apart.high, three_figures)
    return (
        f"{said}: these are {three_figures(apart.mean)}{bracket} times as far as the baseline's "
        f"(limit {limit:.3g})."
    )
