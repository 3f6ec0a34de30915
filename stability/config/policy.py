"""What a study calls a pass: how far its candidate may move the weights, by which yardstick.

Leaves out the judgement (`analysis.verdict`).
"""

from dataclasses import dataclass

from stability.config.groups import require

__all__ = ["PolicyConfig"]


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """PASS if `candidate` drifts at most `max_ratio` times as far as `yardstick`, at `step`."""

    candidate: str = ""
    """An arm; empty: `stability verdict` must be told."""
    yardstick: str = ""
    """An arm; empty is the study's own yardstick."""
    max_ratio: float = 0.5
    step: int = 0
    """A step with a snapshot; 0 is the study's early step, where chaos has had little time."""
    level: float = 0.9
    """Of the interval that has to lie on one side of `max_ratio`."""

    def __post_init__(self) -> None:
        require(self.max_ratio > 0, "policy", "max_ratio must be > 0", self.max_ratio)
        require(self.step >= 0, "policy", "step must be >= 0", self.step)
        require(0 < self.level < 1, "policy", "level must be between 0 and 1", self.level)
