"""Quantizes a tensor by a scale from earlier steps: delayed scaling, as Transformer Engine has it.

The scale of a step is the largest value of the format divided by an amax of earlier steps, so the
tensor is read once. What is larger than the past foresaw saturates. Here the state is a value that
goes in and comes out, so that a recomputed forward can use the one of its step again.

Source: NVIDIA's Transformer Engine, recipe `DelayedScaling`. Leaves out scales from the tensor
itself (`block_scaling`), and the sharing of amaxes between ranks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.block_recipes import BlockRecipe
from attention_kernels.block_scaling import Quantized
from attention_kernels.formats import format_named
from attention_kernels.rounding import round_to

__all__ = ["DelayedScale", "delayed_scale", "quantize_delayed"]


@dataclass(frozen=True, slots=True)
class DelayedScale:
    """The amaxes of the last steps, newest last, and the scale that the next step multiplies by."""

    history: Tensor
    scale: Tensor


def delayed_scale(history_len: int = 1024, device: torch.device | str = "cpu") -> DelayedScale:
    """Return the state before the first step: no amax is known, and the scale is 1.

    ValueError for a history that holds nothing.
    """
    if history_len < 1:
        raise ValueError(f"delayed_scale: history_len must be at least 1, got {history_len}")
    return DelayedScale(torch.zeros(history_len, device=device), torch.ones((), device=device))


def quantize_delayed(
    x: Tensor,
    state: DelayedScale,
    *,
    elements: str = "e4m3",
    margin: int = 0,
    amax: str = "max",
    rounding: str = "nearest_even",
    seed: int = 0,
) -> tuple[Quantized, DelayedScale]:
    """Quantize `x` by the scale of `state`; return it with the state of the next step.

    `x` is FP32, BF16 or FP16, of any shape; `elements` a format. The next scale is the largest
    value of the format / amax / 2**margin, amax being the largest of the history (`max`) or that of
    this step (`most_recent`). It stays what it was where that amax is zero or not finite, and is
    the largest FP32 value where it would be infinite. ValueError for another `amax` or dtype.
    """
    if amax not in ("max", "most_recent"):
        raise ValueError(f"quantize_delayed: amax must be max or most_recent, got {amax!r}")
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"quantize_delayed: x must be float32, bfloat16 or float16, got {x.dtype}")
    largest = format_named(elements).max_value
    scaled = (x.float() * state.scale).clamp(-largest, largest)
    rounded = round_to(scaled, elements, rounding, seed=seed).to(x.dtype)
    recipe = BlockRecipe(name=f"delayed-{elements}", elements=elements, block="tensor")
    scales = state.scale.reciprocal().reshape([1] * x.dim())
    history = torch.cat([state.history[1:], x.abs().amax().float().reshape(1)])
    known = history.amax() if amax == "max" else history[-1]
    scale = largest / known / 2.0**margin
    scale = scale.where((known > 0) & known.isfinite(), state.scale)
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    return Quantized(rounded, scales, None, recipe, -1, seed), DelayedScale(history, scale)
