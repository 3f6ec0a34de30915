"""Drift between any two arms of a study, by seed and step, from their snapshots.

A study logs each arm's drift from its baseline alone; two other arms may be a pair as well: FP16
and FP32 of one attention, or two attentions in FP16. Nothing is believed: each pair is proven
before it is measured. Leaves out what a drift means (`ladder`, `growth_law`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.kit.rows import by_seed
from stability.analysis.pair_proof import prove_pair
from stability.metrics.drift import ALL, drift
from stability.metrics.growth_fit import drift_slope
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import read_run_snapshot

__all__ = ["at_step", "log_scatter", "over", "pair_drift", "slopes"]

Rows = Sequence[Mapping[str, Any]]
"""Of `pair_drift`, with the name of the pair as `pair`."""


def pair_drift(
    study_dir: Path, candidate: str, reference: str, seeds: Iterable[int]
) -> list[dict[str, Any]]:
    """Return a row for each seed and shared snapshot: `seed`, `step`, the pooled drift metrics.

    ValueError if a pair's records break the contract, differ in more than one axis, or lack a run.
    """
    rows = []
    for seed in seeds:
        first, second = (RunPaths.for_run(study_dir, arm, seed) for arm in (reference, candidate))
        proof = prove_pair(first, second)
        if proof.break_ is not None or len(proof.axes) > 1:
            raise ValueError(
                f"pair_drift: {candidate} and {reference} must differ in one axis alone, seed "
                f"{seed}: {proof.sentence}"
            )
        for step in sorted({*snapshot_steps(first)} & {*snapshot_steps(second)}):
            found = drift(read_run_snapshot(second, step), read_run_snapshot(first, step))
            rows.append({"seed": seed, "step": step, **found[ALL]})
    return rows


def at_step(rows: Rows, pair: str, metric: str, step: int) -> dict[int, float]:
    """Return a metric of `pair` at `step`, by seed."""
    return by_seed(rows, metric, pair=pair, step=step)


def slopes(rows: Rows, pair: str, metric: str) -> dict[int, float]:
    """Return the robust slope of a metric of `pair` over all steps, per step, by seed."""
    by_seed: dict[int, dict[int, float]] = {}
    for row in rows:
        if row["pair"] == pair:
            by_seed.setdefault(row["seed"], {})[row["step"]] = row[metric]
    return {seed: drift_slope(list(found), list(found.values())) for seed, found in by_seed.items()}


def over(rows: Rows, pair: str, other: str, metric: str, step: int) -> dict[int, float]:
    """Return a metric of `pair` at `step` divided by that of `other`, by seed."""
    below = at_step(rows, other, metric, step)
    return {seed: value / below[seed] for seed, value in at_step(rows, pair, metric, step).items()}


def log_scatter(values: Mapping[int, float]) -> dict[int, float]:
    """Return by seed how far its value's natural log is from the mean of the other seeds' logs.

    Figures of two pairs can be compared seed by seed, which one coefficient of variation can't.
    ValueError for a value that is not positive.
    """
    logs = {seed: math.log(value) for seed, value in values.items()}
    total, others = sum(logs.values()), len(logs) - 1
    return {seed: abs(log - (total - log) / others) for seed, log in logs.items()}
