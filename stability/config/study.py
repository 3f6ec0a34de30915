"""What a study is: a base, the arms that differ from it, seeds, and what it calls a pass.

Each class checks its own values. Leaves out what an arm holds (`schema`).
"""

import math
from dataclasses import dataclass, field
from typing import Any, Literal

from stability.config.schema import ArmConfig, require

__all__ = ["LEAST_ALPHA", "Keep", "PolicyConfig", "StudyConfig"]

Keep = Literal["all", "reference", "last", "none"]
"""Which snapshots of a study stay."""


LEAST_ALPHA = 0.01
"""Below it no planted fault can be found, so nothing could pass: p-values are simulated with 9,999
draws, and at the operator each of 24 tests has a part of one look's error rate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyConfig:
    """What a study's candidates must hold to, on each of the four levels of evidence."""

    candidates: tuple[str, ...] = ()
    """The arms that are judged; none: every arm whose role is `candidate`."""
    step: int = 0
    """A step with a snapshot, where the weights are compared; 0: the window rule picks it."""
    window_limit: float = 0.04
    """The window ends before the first snapshot at which a nudge has |log E| above this."""
    max_error_ratio: float = 2.0
    """Operator: most of the error of plain attention, both against FP64."""
    max_gain: float = 1e-3
    """Operator: most that the slope of a result on the golden may differ from 1."""
    max_bias_ulp: float = 0.05
    """Operator: most of the mean signed error, in units of the last place."""
    max_gradient_ratio: float = 2.0
    """Gradient: most of the baseline's error in the whole model's gradient."""
    max_share: float = 0.01
    """Gradient: most of the error's power that repeats from look to look, (C - 1) / (N - 1)."""
    max_excess: float = 1.10
    """Training: most of the baseline's distance to the reference."""
    margin_nats: float = 0.005
    """Outcome: a held-out loss this much higher is a loss that matters."""
    alpha: float = 0.05
    """The chance of a wrong answer, over all looks and in each direction; at least LEAST_ALPHA in a
    study that begins."""

    def __post_init__(self) -> None:
        require(self.step >= 0, "policy", "step must be >= 0", self.step)
        for name in ("window_limit", "max_gain", "max_bias_ulp", "margin_nats"):
            value = getattr(self, name)
            require(0 < value < math.inf, "policy", f"{name} must be > 0 and finite", value)
        for name in ("max_error_ratio", "max_gradient_ratio", "max_excess"):
            value = getattr(self, name)
            rule = f"{name} must be above 1, which is the baseline's own, and finite"
            require(1 < value < math.inf, "policy", rule, value)
        require(0 < self.max_share < 1, "policy", "max_share must be in (0, 1)", self.max_share)
        require(0 < self.alpha < 0.5, "policy", "alpha must be in (0, 0.5)", self.alpha)
        require(
            len(set(self.candidates)) == len(self.candidates),
            "policy",
            "candidates must name each arm once",
            list(self.candidates),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """A baseline, its candidates and the seeds each is repeated over.

    `arms` maps each arm's name to what it overrides in `base`, and to its `role`, `until` and
    `change` where these are given; the arm called `baseline` overrides nothing. `yardstick` names
    the arm that drifts are put in ratio to; without one it is the reference.
    """

    name: str
    """The study's name and that of its folder: at most 64 letters, digits, `.`, `_` or `-`."""
    question: str
    """What the study asks, as a sentence; reports and W&B show it."""
    base: ArmConfig
    """The description of a run that every arm is, less what it changes."""
    arms: dict[str, dict[str, Any]]
    """By name, what each arm changes of `base`; also its `role`, `until` and `change`."""
    seeds: tuple[int, ...] = (0,)
    """Every arm is trained once with each of these: whole numbers, none twice, below 2**32."""
    yardstick: str = ""
    """The arm that the ladder's ratios are taken to; empty: the reference."""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    """Which arms are judged, and the limits they are held to."""
    allow_many: bool = False
    """Let an arm change several axes; it is then called confounded wherever it is shown."""
    keep: Keep = "all"
    """Which snapshots stay once all that needs them is on record: all; those of the baseline and of
    arms of role reference; each run's last; or none. Those of step 0, hashes and sketches always
    stay. Checkpoints stay with `all` alone: without one `stability fork` trains the run anew."""
    early_step: int = 0
    """The early, matched step the ladder reads; 0 means the one that candidates are judged at."""
