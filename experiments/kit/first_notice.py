"""From which step on a signal tells two runs apart, decided over seeds.

A signal's gap, how far it lies from that of the paired run, is held against the gap of another
pair whose difference is known to mean nothing: a nudge. Leaves out how signals are measured.
"""

import math
from collections.abc import Mapping

from stability.analysis.intervals import paired_interval

__all__ = ["LOOKS", "first_notice"]

LOOKS = 3
"""Looks in a row that must tell: a single one does by chance once in twenty at a level of 0.9.
Looks of one run are not independent, so this is a rule and no level of its own."""


def first_notice(ratios: Mapping[int, Mapping[int, float]], level: float = 0.9) -> int | None:
    """Return the first step from which `LOOKS` looks in a row tell, None if there is none.

    `ratios`, by step and seed, are gap over meaningless gap, NaN where that is 0. A look tells if
    the interval over its seeds lies above 1. ValueError for a negative ratio.
    """
    told: list[int] = []
    for step in sorted(ratios):
        known = not any(math.isnan(ratio) for ratio in ratios[step].values())
        tells = known and paired_interval(ratios[step], level).low > 1
        told = [*told, step] if tells else []
        if len(told) == LOOKS:
            return told[0]
    return None
