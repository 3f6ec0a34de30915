"""From a study to its arms: each one's whole config, its axis, and how it differs.

Pure: reads and writes nothing. Leaves out whether the differences are allowed (`contract`).
"""

from dataclasses import dataclass, replace
from typing import Any

from stability.config.diff import diff
from stability.config.load import override
from stability.config.schema import BASELINE, ArmConfig, SeedConfig, StudyConfig

__all__ = ["Arm", "expand", "with_seed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """One arm of a study, before it is repeated over seeds."""

    name: str
    config: ArmConfig
    diff: dict[str, tuple[Any, Any]]
    """Dotted config path -> (baseline's value, this arm's value)."""


def expand(study: StudyConfig) -> list[Arm]:
    """Return the arms of `study`, the baseline first.

    An arm that changes the attention is shadowed by the baseline's attention; the others by the
    study's `probe.shadows`.
    """
    arms = []
    for name, changes in study.arms.items():
        config = override(study.base, changes, where=f"arms.{name}")
        if config.attention != study.base.attention:
            probe = replace(config.probe, shadows=(study.base.attention,), shadows_are="baseline")
            config = replace(config, probe=probe)
        arms.append(Arm(name=name, config=config, diff=diff(study.base, config)))
    return sorted(arms, key=lambda arm: arm.name != BASELINE)


def with_seed(config: ArmConfig, seed: int) -> ArmConfig:
    """Return `config` with the study's seed; the arm's own offsets stay."""
    offsets = config.seed
    return replace(
        config,
        seed=SeedConfig(
            base=seed, init_offset=offsets.init_offset, order_offset=offsets.order_offset
        ),
    )
