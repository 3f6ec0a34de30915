"""Attention whose every rounding is named: golden, baseline, and flash in two engines."""

from attention_kernels.api import (
    AttentionFn,
    AttentionOutput,
    MaskArguments,
    baseline_attention,
    flash_attention,
    golden_attention,
    resolve_engine,
)
from attention_kernels.formats import Format, round_to
from attention_kernels.numerics import BaselineNumerics, FlashNumerics
from attention_kernels.peers.registry import attention
from attention_kernels.profiles import BASELINE_PROFILES, PROFILES

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
    "baseline_attention",
    "flash_attention",
    "golden_attention",
    "resolve_engine",
    "round_to",
]
