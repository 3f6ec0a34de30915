"""The sampling floor of W1: two independent samples of one law are this far apart anyway.

About 1.8 * sigma / sqrt(n) for n values with standard deviation sigma. Between arms that start from
different initial weights, a W1 below it says nothing. Leaves out the Wasserstein distance itself.
"""

import math

from safetensors import safe_open

from stability.analysis.study_records import RecordedRun
from stability.records.paths import snapshot_steps

__all__ = ["INDEPENDENT_AXES", "w1_floor"]

INDEPENDENT_AXES = ("seed", "init")
"""Axes whose arms start from weights that were drawn independently of the baseline's."""


def w1_floor(run: RecordedRun, step: int) -> float | None:
    """Return the sampling floor of `run`'s pooled W1 at `step`, in units of the weights.

    None where it can't be told: no drift at that step, no spread, or no snapshot to count from.
    """
    w1 = run.drift("w1").get(step)
    w1_over_std = run.drift("w1_over_std").get(step)
    count = _values(run)
    if not w1 or not w1_over_std or not count:
        return None
    return 1.8 * (w1 / w1_over_std) / math.sqrt(count)


def _values(run: RecordedRun) -> int:
    """Return how many values the run's weights have, from the header of one snapshot."""
    steps = snapshot_steps(run.paths)
    if not steps:
        return 0
    with safe_open(run.paths.snapshot(steps[-1]), framework="pt") as snapshot:
        names = snapshot.keys()
        return sum(math.prod(snapshot.get_slice(name).get_shape()) for name in names)
