"""A sparkline: values over the steps as one short word of blocks.

The scale stands in words beside it. A value without a place on the scale is no block: an exact zero
is `0`, a value beyond an end `^` or `v`, one that is no number `!`, a missing one a dot.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.console import Console

from stability.analysis.number_text import scientific
from stability.report.view.robust_limit import robust_limit

__all__ = ["Scale", "Sparks", "evenly", "linear_scale", "log_scale"]

_BLOCKS = ("▁▂▃▄▅▆▇█", "·")
_ASCII = ("_.-:=+*#", "?")


@dataclass(frozen=True, slots=True)
class Scale:
    """From the lowest block to the highest; both ends are equal where there is one value."""

    low: float
    high: float
    is_log: bool

    def place(self, value: float) -> float:
        """Return where `value` lies, 0 at the low end and 1 at the high one."""
        if self.low == self.high:
            return 0.5
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def __str__(self) -> str:
        kind = "log" if self.is_log else "linear"
        return f"{kind} scale from {scientific(self.low)} to {scientific(self.high)}"


def log_scale(values: Iterable[float]) -> Scale:
    """Return the log scale over the positive ones of `values`."""
    found = [value for value in values if 0 < value < math.inf]
    return Scale(min(found, default=1.0), max(found, default=1.0), is_log=True)


def linear_scale(values: Iterable[float]) -> Scale:
    """Return a linear scale with 0 in its middle; a few absurd values may lie beyond its ends."""
    limit = robust_limit(values)
    return Scale(-limit, limit, is_log=False)


@dataclass(frozen=True, slots=True)
class Sparks:
    """The characters that a console can print."""

    blocks: str
    missing: str

    @classmethod
    def for_console(cls, console: Console) -> "Sparks":
        """Return blocks, or ASCII where the console's encoding has none."""
        try:
            "".join(_BLOCKS).encode(console.encoding)
        except UnicodeEncodeError:
            return cls(*_ASCII)
        return cls(*_BLOCKS)

    def line(self, values: Iterable[float | None], scale: Scale) -> str:
        """Return a character for each of `values`; None is missing."""
        return "".join(self._mark(value, scale) for value in values)

    def key(self) -> str:
        """Return what the characters mean that are no blocks."""
        return f"0 is exact, {self.missing} missing, ^ and v off the scale, ! no number"

    def _mark(self, value: float | None, scale: Scale) -> str:
        if value is None:
            return self.missing
        if not math.isfinite(value):
            return "!"
        if value == 0:
            return "0"
        if not scale.low <= value <= scale.high:
            return "^" if value > scale.high else "v"
        return self.blocks[round(scale.place(value) * (len(self.blocks) - 1))]


def evenly(steps: Sequence[int], most: int) -> list[int]:
    """Return at most `most` of `steps`, evenly spaced, the first and the last among them."""
    if len(steps) <= most:
        return list(steps)
    return [steps[round(index * (len(steps) - 1) / (most - 1))] for index in range(most)]
