"""What stands beside a mean wherever it is shown: its interval, with too few seeds their range.

Leaves out the interval itself (`analysis.intervals`).
"""

import math
from collections.abc import Callable

from stability.analysis.intervals import replicates_needed
from stability.analysis.number_text import span
from stability.analysis.seed_values import SeedValues

__all__ = ["LEVEL", "bracketed", "ends", "what_ends_are", "written_ends"]

LEVEL = 0.9
EN_DASH = "\N{EN DASH}"


def ends(spread: SeedValues) -> tuple[float, float]:
    """Return the interval of the mean; the smallest and largest seed where there is none."""
    interval = spread.interval
    return (spread.low, spread.high) if math.isnan(interval.low) else (interval.low, interval.high)


def written_ends(spread: SeedValues, write: Callable[[float], str]) -> str:
    """Return `[low, high]` for an interval, `low-high` for a range; empty if both are alike."""
    if math.isnan(spread.interval.low):
        return span(spread, write, EN_DASH)
    low, high = ends(spread)
    return bracketed(write(spread.mean), low, high, write) if write(low) != write(high) else ""


def bracketed(mean: str, low: float, high: float, write: Callable[[float], str]) -> str:
    """Return an interval with what its ends share with the mean once, or not at all.

    `[1.1, 1.3]e-04` beside `1.2e-04`, `[0.58, 0.66]` beside `0.62x`.
    """
    _, _, exponent = mean.partition("e")
    scale = 10.0 ** int(exponent) if exponent else 1.0
    if exponent and min(abs(low), abs(high)) >= 0.05 * scale:  # else it would seem to be 0
        return f"[{low / scale:.1f}, {high / scale:.1f}]e{exponent}"
    return f"[{write(low).removesuffix('x')}, {write(high).removesuffix('x')}]"


def what_ends_are(seeds: int) -> str:
    """Return the words for `ends` in a study of so many seeds."""
    needed = replicates_needed(LEVEL)
    if seeds >= needed:
        return (
            f"{LEVEL:.0%} interval of the mean over the seeds, and smallest to largest seed where "
            f"fewer than {needed} have run"
        )
    return "smallest to largest seed" if seeds > 1 else "none, with one seed"
