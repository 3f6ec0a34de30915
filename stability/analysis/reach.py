"""How far a scale around zero should reach, for values of which a few may be absurd.

Where an attention fails, its errors are any number of ULPs: one such bias of 1e31 among values near
1 would make a scale that shows nothing else. Leaves out how what lies beyond is shown.
"""

import math
from collections.abc import Iterable
from statistics import median

__all__ = ["robust_reach"]

WITHIN = 4.0
"""In units of the median magnitude. Of normal noise 0.7 % lies beyond."""


def robust_reach(values: Iterable[float]) -> float:
    """Return the largest magnitude, but no more than WITHIN times the median one; 1 for no values.

    Zeros and values that are no number do not count.
    """
    found = [abs(value) for value in values if value and math.isfinite(value)]
    return min(max(found), WITHIN * median(found)) if found else 1.0
