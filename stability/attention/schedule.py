"""Which steps the probe looks at."""

from dataclasses import dataclass

__all__ = ["EveryN"]


@dataclass(frozen=True, kw_only=True, slots=True)
class EveryN:
    """Steps 0, `every`, 2 * `every`, ...; `every=0` means never."""

    every: int

    def __post_init__(self) -> None:
        if self.every < 0:
            raise ValueError(f"EveryN: every must be >= 0, got {self.every}; 0 switches it off")

    def is_due(self, step: int) -> bool:
        """Whether `step` is to be probed."""
        return self.every > 0 and step % self.every == 0
