"""A quantity that was measured once per seed, such as one arm's drift at one step.

Its mean is never shown without its smallest and largest value, so all three are read from here.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from stability.analysis.intervals import Interval, mean_interval, paired_interval
from stability.records.sealed_json import jsonable

__all__ = ["SeedValues"]


@dataclass(frozen=True, slots=True)
class SeedValues:
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
        """The 90 % interval of the mean; its ends are NaN with fewer than 3 seeds.

        Of values that are all positive it is that of the geometric mean: drifts and ratios are
        nearer to a normal law in their logs, and no end of theirs is negative.
        """
        is_positive = all(0 < value < math.inf for value in self.per_seed.values())
        return (paired_interval if is_positive else mean_interval)(self.per_seed)

    def over(self, other: "SeedValues") -> "SeedValues":
        """Return this quantity divided by `other`, seed by seed.

        Seeds that only one of them has, and seeds where `other` is 0, are left out.
        """
        return SeedValues(
            {
                seed: value / other.per_seed[seed]
                for seed, value in self.per_seed.items()
                # a NaN is true, so a ratio to no number stays in as no number
                if other.per_seed.get(seed)
            }
        )

    def to_dict(self) -> dict[str, object]:
        """Return JSON-able values; numbers that are not finite as strings, missing ones as None."""
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
        # min and max keep or drop a NaN by its place in the list
        if not values or any(math.isnan(value) for value in values):
            return math.nan
        return choose(values)
