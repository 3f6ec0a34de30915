"""The attention implementations that a config may name: the one table of them.

`load` checks a study's YAML against it, and `probe.attention_registry` resolves a name by it. The
function that resolves a name is itself a name here, since it needs torch and a mistake in a study
is told without waiting for that. Leaves out what other packages add (`plugins`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from attention_kernels.profiles import (
    BASELINE_PROFILES,
    DEFAULT_BASELINE_PROFILE,
    DEFAULT_FLASH_PROFILE,
    PROFILES,
)

__all__ = ["HEAD_DIMS", "IMPLEMENTATIONS", "Implementation", "takes_head_dim"]


class Implementation(NamedTuple):
    """How the name of an implementation is resolved, and the profiles that it knows."""

    resolver: str
    """MODULE:FUNCTION of (config, device) that returns a `ResolvedAttention`."""
    profiles: Mapping[str, Any] = {}
    """Numerics by name; None where the implementation's own cannot be changed."""
    default: str = ""
    """The profile that an empty name stands for, if it is one of `profiles`."""


HEAD_DIMS = (16, 256)
"""The least and the greatest head_dim that `attention_kernels` computes, golden included.

It is `attention_kernels.checks` that refuses others, and which needs torch."""

_REGISTRY = "stability.probe.attention_registry"

IMPLEMENTATIONS: dict[str, Implementation] = {
    "baseline": Implementation(
        f"{_REGISTRY}:resolve_baseline", BASELINE_PROFILES, DEFAULT_BASELINE_PROFILE
    ),
    "flash": Implementation(f"{_REGISTRY}:resolve_flash", PROFILES, DEFAULT_FLASH_PROFILE),
    "golden": Implementation(f"{_REGISTRY}:resolve_golden"),
    "sdpa": Implementation(  # its profiles are PyTorch's backends
        f"{_REGISTRY}:resolve_sdpa", dict.fromkeys(("math", "flash", "efficient", "cudnn"))
    ),
}
"""A new implementation is a row here, beside a file of its own. A user's own function needs neither
of them."""


def takes_head_dim(implementation: str, profile: str, head_dim: int) -> bool:
    """Whether an attention of that name can have `head_dim`; a user's own is believed to."""
    # PyTorch's own choice of a kernel is called without `attention_kernels`
    is_free = implementation not in IMPLEMENTATIONS or (implementation, profile) == ("sdpa", "")
    return is_free or HEAD_DIMS[0] <= head_dim <= HEAD_DIMS[1]
