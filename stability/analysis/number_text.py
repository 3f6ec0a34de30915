"""How a number is written, so that terminal, report and verdict write it alike."""

import math
import re
from collections.abc import Callable

from stability.analysis.seed_values import SeedValues

__all__ = ["EXACT_ZERO", "MISSING", "finely", "plain", "scientific", "span", "times"]

EXACT_ZERO = "0 (exact)"
MISSING = "\N{EN DASH}"


def scientific(value: float) -> str:
    """Write a drift: `3.1e-04`, an exact zero as `0 (exact)`."""
    return EXACT_ZERO if value == 0 else f"{value:.1e}"


def times(value: float) -> str:
    """Write a ratio with two figures: `0.031x`, `0.97x`, `12x`; an exact zero as `0x`."""
    # from 9.95 up two figures are a whole number, and #.2g would end it in a point
    if value == 0 or not math.isfinite(value) or abs(value) >= 9.95:
        return f"{value:.0f}x"
    return f"{value:#.2g}x"


def plain(value: float) -> str:
    """Write a loss: `1.234`."""
    return f"{value:.3f}"


def finely(value: float) -> str:
    """Write a held-out loss, whose paired differences are small: `1.23456`."""
    return f"{value:.5f}"


def span(values: SeedValues, write: Callable[[float], str], between: str) -> str:
    """Write the range over the seeds, a shared unit once: `5.5 to 5.9e-05`, `0.31 to 0.33x`.

    Empty if there are no seeds, or if they can't be told apart as written.
    """
    low, high = write(values.low), write(values.high)
    if low == high or not values.n:
        return ""
    number = re.sub(r"[^\d.].*", "", low)
    shared = high.endswith(low.removeprefix(number))
    return f"{number if shared else low}{between}{high}"
