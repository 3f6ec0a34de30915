"""The names of the planted faults, for whoever checks a name before it loads torch.

What each fault is and how it is planted is in `faults`.
"""

__all__ = ["FAULT_NAMES"]

FAULT_NAMES = (
    "scale_gain",
    "dq_gain",
    "dk_gain",
    "dv_gain",
    "out_gain",
    "out_gain_1pct",
    "dropped_key",
    "stale_block",
    "delta_off",
    "bias_tenth_ulp",
    "causal_leak",
)
