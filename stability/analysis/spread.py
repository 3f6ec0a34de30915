"""A quantity measured once per seed: its mean never travels without its smallest and largest value.

Leaves out where the values come from. Also holds how a single number is written in a table or a
sentence, so that the terminal, the report and the verdict write it alike.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stability.analysis.intervals import Interval, mean_interval
from stability.records.sealed_json import jsonable

__all__ = ["EXACT_ZERO", "MISSING", "Spread", "plain", "scientific", "span", "times"]

EXACT_ZERO = "0 (exact)"
MISSING = "\N{EN DASH}"


@dataclass(frozen=True, slots=True)
class Spread:
    """The values of one quantity by seed; empty where nothing was measured."""

    per_seed: Mapping[int, float] = field(default_factory=dict)

    @property
    def n(self) -> int:
        """How many seeds were measured."""
        return len(self.per_seed)

    @property
    def mean(self) -> float:
        """Mean over the seeds; NaN if there are none."""
        return sum(self.per_seed.values()) / self.n if self.n else math.nan

    @property
    def low(self) -> float:
        """Smallest seed; NaN if there are none, or if one of them is NaN."""
        return self._extreme(min)

    @property
    def high(self) -> float:
        """Largest seed; NaN if there are none, or if one of them is NaN."""
        return self._extreme(max)

    @property
    def is_zero(self) -> bool:
        """Whether there are seeds and each is exactly 0."""
        return self.n > 0 and all(value == 0 for value in self.per_seed.values())

    @property
    def interval(self) -> Interval:
        """The 90 % interval of the mean; its ends are NaN with fewer than 5 seeds."""
        return mean_interval(self.per_seed)

    def over(self, other: "Spread") -> "Spread":
        """Return this quantity divided by `other`, seed by seed.

        Seeds that only one of them has, and seeds where `other` is 0, are left out.
        """
        return Spread(
            {
                seed: value / other.per_seed[seed]
                for seed, value in self.per_seed.items()
                if other.per_seed.get(seed)
            }
        )

    def to_dict(self) -> dict[str, object]:
        """Return the spread as JSON-able values; non-finite numbers as strings, missing as None."""
        interval = self.interval
        has_interval = not math.isnan(interval.low)
        return jsonable(
            {
                "n": self.n,
                "mean": self.mean if self.n else None,
                "min": self.low if self.n else None,
                "max": self.high if self.n else None,
                "interval": [interval.low, interval.high] if has_interval else None,
                "per_seed": {str(seed): value for seed, value in self.per_seed.items()},
            }
        )

    def _extreme(self, choose: Callable[[list[float]], float]) -> float:
        values = list(self.per_seed.values())
        if not values or any(math.isnan(value) for value in values):
            return math.nan
        return choose(values)


def scientific(value: float) -> str:
    """Write a drift: `3.1e-04`, an exact zero as `0 (exact)`."""
    return EXACT_ZERO if value == 0 else f"{value:.1e}"


def times(value: float) -> str:
    """Write a ratio with two figures: `0.031x`, `0.97x`, `12x`; an exact zero as `0x`."""
    if value == 0 or not math.isfinite(value) or abs(value) >= 9.95:
        return f"{value:.0f}x"
    return f"{value:#.2g}x"


def plain(value: float) -> str:
    """Write a loss: `1.234`."""
    return f"{value:.3f}"


def span(spread: Spread, write: Callable[[float], str], between: str) -> str:
    """Write the range over the seeds, a shared unit once: `5.5 to 5.9e-05`, `0.31 to 0.33x`.

    Empty if there are no seeds, or if they can't be told apart as written.
    """
    low, high = write(spread.low), write(spread.high)
    if low == high or not spread.n:
        return ""
    number = re.sub(r"[^\d.].*", "", low)
    shared = high.endswith(low.removeprefix(number))
    return f"{number if shared else low}{between}{high}"
