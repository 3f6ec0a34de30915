"""What a user needs to test an attention: hard inputs, an error budget, and planted faults."""

from attention_kernels.testing.budget import (
    assert_within_budget,
    error_budget,
    nan_filled,
    with_gradients,
)
from attention_kernels.testing.faults import injected_bias, scale_off, skip_last_key
from attention_kernels.testing.inputs import HARD_SHAPES, Shape, make_packed, make_qkv

__all__ = [
    "HARD_SHAPES",
    "Shape",
    "assert_within_budget",
    "error_budget",
    "injected_bias",
    "make_packed",
    "make_qkv",
    "nan_filled",
    "scale_off",
    "skip_last_key",
    "with_gradients",
]
