"""The limit of a scale around zero, for values of which a few may be absurdly large.

Where an attention fails, its errors are any number of ULPs. One bias of 1e31 among values near 1
would stretch the scale until it shows nothing else. What lies beyond the limit is left to the
chart.
"""

import math
from collections.abc import Iterable
from statistics import median

__all__ = ["robust_limit"]

TIMES_MEDIAN = 4.0
"""Of normally distributed values 0.7 % lie beyond 4 times the median magnitude."""


def robust_limit(values: Iterable[float]) -> float:
    """Return the largest magnitude, capped at TIMES_MEDIAN times the median one; 1 without values.

    Zeros, infinities and NaN do not count.
    """
    magnitudes = [abs(value) for value in values if value and math.isfinite(value)]
    return min(max(magnitudes), TIMES_MEDIAN * median(magnitudes)) if magnitudes else 1.0
