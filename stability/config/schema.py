"""What an arm and a study are, as frozen dataclasses: the YAML files hold only their values.

Leaves out the groups an arm is made of (`groups`, `observation`), reading YAML and naming mistakes
(`load`), the comparison of two arms (`diff`) and every object that a name stands for
(`study.assemble`).
"""

from dataclasses import dataclass, field
from typing import Any, Literal

from stability.config.groups import (
    AttentionConfig,
    DataConfig,
    ModelConfig,
    NudgeConfig,
    OptimizerConfig,
    SeedConfig,
    TrainConfig,
)
from stability.config.observation import ProbeConfig, WatchConfig
from stability.config.policy import PolicyConfig
from stability.config.precision import check_precision

__all__ = ["AXES", "BASELINE", "ArmConfig", "Axis", "StudyConfig"]

Axis = Literal[
    "attention",
    "precision",
    "init",
    "seed",
    "data_order",
    "optimizer_eps",
    "nudge",
    "many",
    "none",
]
"""What an arm changes; `many` only where a study allows several at once."""

BASELINE = "baseline"
"""The arm that every other arm of its study is paired with."""

AXES: dict[Axis, str] = {
    "attention": "attention",
    "precision": "precision",
    "init": "model.init",
    "seed": "seed.init_offset",
    "data_order": "seed.order_offset",
    "optimizer_eps": "optimizer.eps",
    "nudge": "nudge",
}
"""The config path that each axis changes; `none`, the A/A control, changes nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArmConfig:
    """One training run, fully described."""

    model: ModelConfig
    attention: AttentionConfig = field(default_factory=AttentionConfig)
    precision: str = "bf16-mixed"
    """`64-true`, `32-true`, `bf16-mixed`, `bf16-true`, `16-mixed` or `emulated:<format>`."""
    seed: SeedConfig = field(default_factory=SeedConfig)
    nudge: NudgeConfig = field(default_factory=NudgeConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    probe: ProbeConfig = field(default_factory=ProbeConfig)
    watch: WatchConfig = field(default_factory=WatchConfig)

    def __post_init__(self) -> None:
        check_precision(self.precision)


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyConfig:
    """A baseline, its candidates and the seeds each is repeated over.

    `arms` maps each arm's name to what it overrides in `base`; the arm called `baseline` overrides
    nothing. `yardstick` names the arm that drifts are put in ratio to.
    """

    name: str
    question: str
    base: ArmConfig
    arms: dict[str, dict[str, Any]]
    seeds: tuple[int, ...] = (0,)
    yardstick: str = ""
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    allow_many: bool = False
    """Let an arm change several axes; it is then called confounded wherever it is shown."""
    early_step: int = 0
    """The early, matched step the ladder reads; 0 means the first snapshot after step 0."""
