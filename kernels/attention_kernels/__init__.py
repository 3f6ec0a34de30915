"""Attention whose every rounding is named: golden, baseline, and flash in two engines.

Public names are loaded when they are first used: numerics, formats and profiles are plain values,
and a command that only checks them must not wait for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from attention_kernels.api import (
        AttentionFn,
        AttentionOutput,
        baseline_attention,
        dropout_keep_mask,
        flash_attention,
        golden_attention,
        resolve_engine,
    )
    from attention_kernels.cached_keys import attention_with_kvcache
    from attention_kernels.formats import Format
    from attention_kernels.masks import MaskArguments
    from attention_kernels.numerics import BaselineNumerics, FlashNumerics
    from attention_kernels.peers.registry import attention
    from attention_kernels.profiles import BASELINE_PROFILES, PROFILES
    from attention_kernels.rounding import round_to

__all__ = [
    "BASELINE_PROFILES",
    "PROFILES",
    "AttentionFn",
    "AttentionOutput",
    "BaselineNumerics",
    "FlashNumerics",
    "Format",
    "MaskArguments",
    "attention",
    "attention_with_kvcache",
    "baseline_attention",
    "dropout_keep_mask",
    "flash_attention",
    "golden_attention",
    "resolve_engine",
    "round_to",
]

_HOMES = {
    "BASELINE_PROFILES": "profiles",
    "PROFILES": "profiles",
    "AttentionFn": "api",
    "AttentionOutput": "api",
    "BaselineNumerics": "numerics",
    "FlashNumerics": "numerics",
    "Format": "formats",
    "MaskArguments": "masks",
    "attention": "peers.registry",
    "attention_with_kvcache": "cached_keys",
    "baseline_attention": "api",
    "dropout_keep_mask": "api",
    "flash_attention": "api",
    "golden_attention": "api",
    "resolve_engine": "api",
    "round_to": "rounding",
}


def __getattr__(name: str) -> Any:
    """Load a public name from its module, and keep it: the next use finds it at once."""
    if name not in _HOMES:
        raise AttributeError(f"module 'attention_kernels' has no attribute {name!r}")
    home = importlib.import_module(f"attention_kernels.{_HOMES[name]}")
    globals()[name] = getattr(home, name)
    return globals()[name]
