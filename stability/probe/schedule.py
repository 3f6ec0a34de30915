"""Which steps the probe looks at."""

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The multiples of `every`, the steps in `steps`, and `per_decade` log-spaced ones.

    Log-spaced are 0, and 10^(i / per_decade) rounded, for i = 0, 1, 2, ...: with 3, the steps 0, 1,
    2, 5, 10, 22, 46, 100, ... Each of the three is off at 0 or empty. ValueError for a negative
    number.
    """

    every: int = 0
    steps: tuple[int, ...] = ()
    per_decade: int = 0

    def __post_init__(self) -> None:
        for name, value in (
            ("every", self.every),
            ("per_decade", self.per_decade),
            ("steps", min(self.steps, default=0)),
        ):
            if value < 0:
                raise ValueError(f"Schedule: {name} must be >= 0, got {value}; 0 switches it off")

    def is_due(self, step: int) -> bool:
        """Whether `step`, counted in updates from 0, is to be probed."""
        if step in self.steps or (self.every > 0 and step % self.every == 0):
            return True
        return self.per_decade > 0 and self._is_log_spaced(step)

    def _is_log_spaced(self, step: int) -> bool:
        if step == 0:
            return True
        power = len(str(step)) - 1
        first, last = power * self.per_decade, (power + 1) * self.per_decade
        return any(round(10 ** (i / self.per_decade)) == step for i in range(first, last + 1))
