"""What stands beside a mean wherever it is shown: its interval, with too few seeds their range.

Leaves out the interval itself (`analysis.intervals`).
"""

import math

from stability.analysis.intervals import replicates_needed
from stability.analysis.spread import Spread

__all__ = ["LEVEL", "ends", "what_ends_are"]

LEVEL = 0.9


def ends(spread: Spread) -> tuple[float, float]:
    """Return the interval of the mean; the smallest and largest seed where there is none."""
    interval = spread.interval
    return (spread.low, spread.high) if math.isnan(interval.low) else (interval.low, interval.high)


def what_ends_are(seeds: int) -> str:
    """Return the words for `ends` in a study of so many seeds."""
    needed = replicates_needed(LEVEL)
    if seeds >= needed:
        return (
            f"{LEVEL:.0%} interval of the mean over the seeds, and smallest to largest seed where "
            f"fewer than {needed} have run"
        )
    return "smallest to largest seed" if seeds > 1 else "none, with one seed"
