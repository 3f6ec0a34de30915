"""From which step on a signal tells two runs apart, decided over seeds.

A signal's gap is how far it lies from that of the paired run. It is held against the gap of another
pair, whose difference is known to mean nothing: a nudge. Leaves out how signals are measured.
"""

import math
from collections.abc import Mapping

from stability.analysis.intervals import paired_interval

__all__ = ["IN_A_ROW", "first_notice"]

IN_A_ROW = 3
"""Looks in a row that must tell: a single one does by chance once in twenty at a level of 0.9."""

BySeed = Mapping[int, float]


def first_notice(
    gaps: Mapping[int, BySeed], meaningless: Mapping[int, BySeed], level: float = 0.9
) -> int | None:
    """Return the first step from which `IN_A_ROW` looks tell `gaps` from `meaningless`, or None.

    Both are gaps >= 0 by step and seed, at the same steps. A look tells if the interval of the
    ratio, paired by seed, lies above 1; where the other gap is 0 there is no ratio, and it does not
    tell. ValueError if steps or seeds differ.
    """
    if list(gaps) != list(meaningless) or any(
        set(gaps[step]) != set(meaningless[step]) for step in gaps
    ):
        raise ValueError("first_notice: both gaps must have the same steps and seeds; pair them")
    told: list[int] = []
    for step in sorted(gaps):
        ratios = {
            seed: gap / meaningless[step][seed] if meaningless[step][seed] else math.nan
            for seed, gap in gaps[step].items()
        }
        told = [*told, step] if _above_one(ratios, level) else []
        if len(told) == IN_A_ROW:
            return told[0]
    return None


def _above_one(ratios: BySeed, level: float) -> bool:
    if any(math.isnan(ratio) for ratio in ratios.values()):
        return False
    return paired_interval(ratios, level).low > 1
