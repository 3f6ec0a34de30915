"""How a number is written, so that terminal, report and verdict write it alike."""

import math
import re
from collections.abc import Callable

from stability.analysis.seed_values import SeedValues

__all__ = [
    "EXACT_ZERO",
    "MISSING",
    "bounds",
    "finely",
    "nats",
    "plain",
    "scientific",
    "span",
    "three_figures",
    "times",
]

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


def three_figures(value: float) -> str:
    """Write a factor beside its interval: `0.983`, `1.01`, `26.2`, `2.03e+04`."""
    return f"{value:#.3g}".rstrip(".")


def plain(value: float) -> str:
    """Write a loss: `1.234`."""
    return f"{value:.3f}"


def finely(value: float) -> str:
    """Write a held-out loss, whose paired differences are small: `1.23456`."""
    return f"{value:.5f}"


def nats(value: float) -> str:
    """Write a difference of losses with its sign and two figures: `-1.7e-5`, `+0.012`.

    Decimals would round the small ones, which are most of them, to `-0.0000`.
    """
    if value == 0 or not math.isfinite(value):
        return f"{value:+g}" if value else "0"
    if 1e-3 <= abs(value) < 100:
        return f"{value:+.2g}"
    digits, exponent = f"{value:+.1e}".split("e")
    return f"{digits}e{int(exponent)}"


def bounds(low: float, high: float, write: Callable[[float], str]) -> str:
    """Write an interval that follows its figure: ` [0.98, 1.03]`; empty where there is none."""
    return "" if math.isnan(low) or math.isnan(high) else f" [{write(low)}, {write(high)}]"


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
