"""Errors in units in the last place (ULPs): the spacing of a format's grid, and a histogram.

A ULP says how coarse the format is at a value, so one ULP is the largest error that a single
rounding can be blamed for, whatever the size of the value. Everything here reads and writes the
bits of FP32 and FP64, for two reasons: `torch.ldexp` raises 2 in FP32, so it overflows at 2^128,
and `torch.frexp` gives zero the exponent of 0.5. Leaves out averages over tensors, and which value
an error is put in relation to (`deviation`).
"""

from itertools import pairwise

import torch
from torch import Tensor

from attention_kernels.formats import Format

__all__ = [
    "EXPONENT_BINS",
    "ULP_EDGES",
    "count_by_exponent",
    "inverse_power",
    "merge_into_edges",
    "to_ulps_",
]

_POWERS = tuple(2.0**i for i in range(-1, 7))
ULP_EDGES = (*(-power for power in reversed(_POWERS)), *_POWERS)
"""Inner bounds of the histogram of errors in ULPs: -64 to -0.5 and 0.5 to 64, powers of two. The
first and last bin are open; an error on an edge counts to the bin further from zero."""

EXPONENT_BINS = 512
"""One bin for each sign and exponent of FP32, before they are merged into those of `ULP_EDGES`."""


def to_ulps_(error: Tensor, reference: Tensor, floor: Tensor, target: Format) -> Tensor:
    """Turn errors, in place, into ULPs of `target` at max(|reference|, floor); return them.

    The result is the error over the spacing of `target` at that magnitude, by two multiplications
    instead of a division, and without widening the reference.
    """
    # one by one: the product of both powers can overflow where neither does
    return error.mul_(inverse_power(reference, floor, target)).mul_(2.0**target.mantissa_bits)


def inverse_power(reference: Tensor, floor: Tensor, target: Format) -> Tensor:
    """Return 2^-e, where 2^e is the largest power of two that is at most max(|reference|, floor).

    The floor broadcasts to the reference. The result is made of the bits of FP32, or of FP64 for an
    FP64 reference. In the top binade 2^-e would be subnormal, so e is clamped to one less there.
    """
    wide = reference if reference.dtype == torch.float64 else reference.float()
    integer, bias, mantissa = (
        (torch.int64, 1023, 52) if wide.dtype == torch.float64 else (torch.int32, 127, 23)
    )
    lowest = max(target.min_exponent, 1 - bias) + bias
    highest = min(target.max_exponent, bias - 1) + bias
    mask = (2 * bias + 1) << mantissa
    power = wide.view(integer) & mask
    power.clamp_(min=floor.to(wide.dtype).view(integer) & mask)
    power.clamp_(min=lowest << mantissa, max=highest << mantissa)
    # the exponent field of 2^-e is 2 * bias minus that of 2^e
    return power.neg_().add_((2 * bias) << mantissa).view(wide.dtype)


def count_by_exponent(ulps: Tensor, ok: Tensor | None) -> Tensor:
    """Return how many values have each sign and exponent, FP64; values that are not `ok` count not.

    Counts of several calls can be added before `merge_into_edges`.
    """
    # FP32 is wide enough: what overflows it lands in the open bin, what underflows in the middle
    bins = (ulps.float().view(torch.int32) >> 23).bitwise_and_(EXPONENT_BINS - 1)
    if ok is not None:
        bins = bins.masked_fill_(~ok, EXPONENT_BINS)
    if ulps.device.type == "cpu":
        return torch.bincount(bins.flatten(), minlength=EXPONENT_BINS)[:EXPONENT_BINS].double()
    # bincount asks the device for the largest bin, and so would wait for it
    ones = torch.ones(1, dtype=torch.float64, device=ulps.device).expand(bins.numel())
    counts = torch.zeros(EXPONENT_BINS + 1, dtype=torch.float64, device=ulps.device)
    return counts.scatter_add_(0, bins.flatten().long(), ones)[:EXPONENT_BINS]


def merge_into_edges(counts: Tensor) -> Tensor:
    """Return the counts between `ULP_EDGES`, given those by sign and exponent."""
    side = len(_POWERS)
    # exponent fields at which a bin begins: 0.5 has 126
    starts = [0, *range(126, 126 + side), 256]
    positive = [counts[a:b].sum() for a, b in pairwise(starts)]
    negative = [counts[256 + a : 256 + b].sum() for a, b in pairwise(starts)]
    middle = positive[0] + negative[0]
    return torch.stack([*reversed(negative[1:]), middle, *positive[1:]])
