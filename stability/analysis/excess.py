"""Excess: how much further from a high-precision reference a candidate ends than its baseline.

    E = |w_candidate - w_reference| / |w_baseline - w_reference|

of the weights at one step, seed by seed, without the values that noise moves
(`metrics.noise_moved`). The distance to the *baseline* is no measure of harm: it
holds the baseline's own rounding error and whatever chaos has made of the difference, so exact FP64
attention is as far from a BF16 baseline as a poor candidate is. Seen from the reference both sides
have errors of their own: a candidate that rounds as well as the baseline has E = 1, a better one
less, and one with twice the error, far beyond the baseline's, nearly 2.

E is a ratio of two positive numbers whose errors multiply, so all statistics are of log E. Leaves
out at which step E is read (`window`), the files with the
distances (`records.distances`) and the sentence (`training_evidence`).
"""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from stability.analysis.intervals import p_values, paired_interval
from stability.config.schema import BASELINE
from stability.records.distances import DistanceMatrix

__all__ = ["Excess", "excess_at", "excess_over_seeds", "log_excess_of", "seeds_that_decide"]

MOST_SEEDS = 1000


@dataclass(frozen=True, kw_only=True, slots=True)
class Excess:
    """E over seeds: geometric mean, bounds, and how sure it is that a limit is kept or not."""

    per_seed: Mapping[int, float]
    mean: float
    low: float
    """One-sided bound at the look's level, as is `high`; NaN below three seeds."""
    high: float
    p_harmed: float
    """The chance of an E this large if the true one is at most the limit."""
    p_holds: float
    """The chance of an E this small if the true one is at least the limit."""


def excess_at(
    matrix: DistanceMatrix, arm: str, reference: str, *, of_all: bool = False
) -> float | None:
    """Return E of `arm`; None if it, the baseline or the reference has no snapshot there.

    None as well where values are left out and a distance is known by sketch alone. NaN where
    weights are NaN, and where baseline and reference are equal, so that there is no error to
    compare with. `of_all` asks of all weights, none left out.
    """
    between = matrix.between if of_all else matrix.kept_between
    own, unit = between(arm, reference), between(BASELINE, reference)
    if own is None or unit is None:
        return None
    return own / unit if unit else math.nan


def log_excess_of(matrix: DistanceMatrix, arm: str, reference: str) -> float | None:
    """Return log E: minus infinity for an arm that is the reference to the bit; else as E."""
    excess = excess_at(matrix, arm, reference)
    if excess is None:
        return None
    return math.log(excess) if excess != 0 else -math.inf


def excess_over_seeds(per_seed: Mapping[int, float], limit: float, alpha: float) -> Excess:
    """Return the geometric mean of E over seeds with one-sided bounds at `alpha` each.

    Bounds and p-values are those of log E (`intervals`), NaN below three seeds; with equal values
    the bounds are the mean. ValueError for no value, or one that is no positive number.
    """
    values = list(per_seed.values())
    if not values or not all(0 < value < math.inf for value in values):
        raise ValueError(
            f"excess_over_seeds: values must be positive numbers, one at least, got {values}; "
            "leave a seed out or say why it has none"
        )
    found = paired_interval(per_seed, 1 - 2 * alpha)
    harmed, holds = p_values({s: math.log(e) for s, e in per_seed.items()}, math.log(limit))
    known = not math.isnan(found.low)
    return Excess(
        per_seed=dict(per_seed),
        mean=found.mean,
        low=found.low,
        high=found.high,
        p_harmed=harmed if known else math.nan,
        p_holds=holds if known else math.nan,
    )


def seeds_that_decide(per_seed: Mapping[int, float], limit: float, alpha: float) -> int | None:
    """Return how many seeds would put both bounds on one side of `limit`, at this scatter.

    A plan for a study and no stopping rule. None if MOST_SEEDS are not enough, or below two seeds.
    """
    if len(per_seed) < 2:
        return None
    from scipy.stats import t  # heavy: 1.2 s of CPU

    logs = [math.log(value) for value in per_seed.values()]
    spread = statistics.stdev(logs)
    distance = abs(statistics.fmean(logs) - math.log(limit))
    for count in range(len(logs), MOST_SEEDS + 1):
        if float(t.isf(alpha, count - 1)) * spread / math.sqrt(count) < distance:
            return count
    return None
