"""Two ways to round a tensor to a floating-point grid that is given by integers.

`round_last_bits` adds to the bits of a value and cuts the last ones off: for a grid with the
exponents of the dtype. `round_on_grid` divides by the spacing of the grid around a value, a power
of two, in FP64, where the quotient and its fraction are exact: for a grid of smaller range. Neither
knows where a format ends. Leaves out the names of formats, and the choice of the way (`formats`).
"""

import torch
from torch import Tensor

__all__ = ["ROUNDINGS", "round_last_bits", "round_on_grid"]

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "away", "stochastic")
"""To the nearest value (ties to even, or away from zero), to the neighbour nearer to zero, to the
one farther from it, or to either with a probability that keeps the mean: to the farther one where
the distance from the nearer, in 2**-24 of the spacing, exceeds 24 random bits."""


def round_last_bits(x: Tensor, dropped: int, rounding: str, random: Tensor | None) -> Tensor:
    """Round FP32 or FP64 values to a grid with `dropped` fewer mantissa bits.

    A carry runs into the exponent, and on to infinity. `random`, int64 of 32 random bits, is read
    where `rounding` is stochastic.
    """
    if dropped <= 0:
        return x
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    if rounding == "nearest_even":
        added = ((bits >> dropped) & 1) + ((1 << (dropped - 1)) - 1)
    elif rounding == "nearest_away":
        added = 1 << (dropped - 1)
    elif rounding == "toward_zero":
        added = 0
    elif rounding == "away":
        added = (1 << dropped) - 1
    else:
        assert random is not None
        chance = random >> 8
        chance = chance << (dropped - 24) if dropped > 24 else chance >> (24 - dropped)
        added = (1 << dropped) - 1 - chance.to(bits.dtype)
    rounded = (bits + added) & -(1 << dropped)
    # The carry of a NaN with a full payload would run into the sign.
    return torch.where(x.isnan(), x, rounded.view(x.dtype))


def round_on_grid(
    x: Tensor, min_exponent: int, mantissa_bits: int, rounding: str, random: Tensor | None
) -> Tensor:
    """Round FP64 values to `mantissa_bits`, fewer below 2**min_exponent, for `min_exponent` > -970.

    Returns a new tensor.
    """
    scaled = x.abs()
    exponent = (scaled.view(torch.int64) >> 52).clamp_(min=min_exponent + 1023)
    quantum = exponent.sub_(mantissa_bits).bitwise_left_shift_(52).view(torch.float64)
    scaled.div_(quantum)
    if rounding == "nearest_even":
        kept = scaled.round_()
    else:
        kept = scaled.floor()
        kept += _goes_up(scaled.sub_(kept), rounding, random)
    return kept.mul_(quantum).copysign_(x)


def _goes_up(fraction: Tensor, rounding: str, random: Tensor | None) -> Tensor:
    """Say where a magnitude goes to the upper neighbour, given its distance from the lower one."""
    if rounding == "toward_zero":
        return torch.zeros_like(fraction, dtype=torch.bool)
    if rounding == "away":
        return fraction > 0
    if rounding == "nearest_away":
        return fraction >= 0.5
    assert random is not None
    return fraction > (random >> 8).double() * 2.0**-24
