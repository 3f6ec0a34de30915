"""What a user needs to test an attention: hard inputs, an error budget, and planted faults.

Public names are loaded when they are first used, as those of the library: a command that only
checks the name of a fault must not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_kernels.testing.budget import (
        assert_within_budget,
        error_budget,
        nan_filled,
        with_gradients,
    )
    from attention_kernels.testing.check import CheckReport, Finding, check_attention
    from attention_kernels.testing.fault_names import FAULT_NAMES
    from attention_kernels.testing.faults import (
        FAULTS,
        Fault,
        injected_bias,
        plant,
        scale_off,
        skip_last_key,
    )
    from attention_kernels.testing.inputs import HARD_SHAPES, Shape, make_packed, make_qkv

__all__ = [
    "FAULTS",
    "FAULT_NAMES",
    "HARD_SHAPES",
    "CheckReport",
    "Fault",
    "Finding",
    "Shape",
    "assert_within_budget",
    "check_attention",
    "error_budget",
    "injected_bias",
    "make_packed",
    "make_qkv",
    "nan_filled",
    "plant",
    "scale_off",
    "skip_last_key",
    "with_gradients",
]

_HOMES = {
    "FAULTS": "faults",
    "FAULT_NAMES": "fault_names",
    "HARD_SHAPES": "inputs",
    "CheckReport": "check",
    "Fault": "faults",
    "Finding": "check",
    "Shape": "inputs",
    "assert_within_budget": "budget",
    "check_attention": "check",
    "error_budget": "budget",
    "injected_bias": "faults",
    "make_packed": "inputs",
    "make_qkv": "inputs",
    "nan_filled": "budget",
    "plant": "faults",
    "scale_off": "faults",
    "skip_last_key": "faults",
    "with_gradients": "budget",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module, and keep it: the next use finds it at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'attention_kernels.testing' has no attribute {name!r}")
    home = importlib.import_module(f"attention_kernels.testing.{_HOMES[name]}")
    globals()[name] = getattr(home, name)
    return globals()[name]
