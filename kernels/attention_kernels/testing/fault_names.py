"""The planted faults by name, and where each must be found, for whoever may not load torch.

What each fault is and how it is planted is in `faults`, and how the levels were measured.
"""

from collections.abc import Mapping
from typing import Literal

__all__ = ["FAULT_LEVELS", "FAULT_NAMES", "Level"]

Level = Literal["operator", "gradient", "training"]

_EARLY: tuple[Level, ...] = ("operator", "gradient")
FAULT_LEVELS: Mapping[str, tuple[Level, ...]] = {
    "scale_gain": ("operator",),
    "dq_gain": ("operator",),
    "dk_gain": ("operator",),
    "dv_gain": _EARLY,
    "out_gain": _EARLY,
    "out_gain_1pct": (*_EARLY, "training"),
    "dropped_key": _EARLY,
    "stale_block": _EARLY,
    "delta_off": ("operator",),
    "bias_tenth_ulp": _EARLY,
    "causal_leak": _EARLY,
}
"""The levels of evidence at which each fault must be found."""
FAULT_NAMES = tuple(FAULT_LEVELS)
