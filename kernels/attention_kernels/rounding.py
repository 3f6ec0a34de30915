"""Rounding of tensors: each value once, to a format that its dtype holds.

A rounded tensor keeps the dtype that carries it: `round_to(x, "bf16")` of an FP32 tensor is an
FP32 tensor whose values lie on the BF16 grid. What follows a rounding point therefore computes in
FP32 or FP64, and no hardware's narrow arithmetic decides a bit.

Three ways lead to the same bits, the quickest first.

1. torch's own cast and back, where it is one correct rounding: FP32 to BF16 and FP16, FP64 to FP32.
   FP64 does not go so to BF16 and FP16: torch casts it through FP32, and 1 + 2**-8 + 2**-40,
   rounded twice, becomes 1.0 in BF16 (the nearest is 1.0078125). Nor does FP8, whose overflow
   differs between versions of torch (`formats`).
2. `round_last_bits` adds to the bits of a value and cuts the last ones off: for a grid with the
   exponents of the dtype.
3. `round_on_grid` divides by the spacing of the grid around a value, a power of two, in FP64, where
   the quotient and its fraction are exact: for a grid of smaller range.

The two grid roundings do not know where a format ends; `round_to` adds that. Leaves out what a
format is (`formats`), and the same rounding on the blocks of a kernel (`triton.rounding`).
"""

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, INPUT_FORMATS, ROUNDINGS, Format, format_named
from attention_kernels.random_bits import bits_at

__all__ = ["DTYPES", "INPUT_DTYPES", "round_into", "round_last_bits", "round_on_grid", "round_to"]

INPUT_DTYPES = {
    getattr(torch, dtype.removeprefix("torch.")): name for dtype, name in INPUT_FORMATS.items()
}
"""The dtypes that q, k and v may have, with the names of their formats."""

DTYPES = {name: dtype for dtype, name in INPUT_DTYPES.items()}
"""The dtype that stores each of these formats."""

_CARRIERS = {torch.float32: FORMATS["fp32"], torch.float64: FORMATS["fp64"]}

# (exponent bits, mantissa bits) of the formats to which torch's cast is one correct rounding.
_CASTS = {
    torch.float32: {(5, 10): torch.float16, (8, 7): torch.bfloat16},
    torch.float64: {(8, 23): torch.float32},
}


def round_to(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest_even",
    *,
    seed: int = 0,
    bits: Tensor | None = None,
) -> Tensor:
    """Round each value of `x` once to `format`.

    `x` is FP32 or FP64, any shape; the result has its dtype and shape, and is `x` itself where
    nothing can change. `rounding` is one of ROUNDINGS. Values that round beyond the range become
    infinite as IEEE 754 says (NaN where the format has no infinity, the largest value where it
    saturates). `stochastic` takes its random bits from `seed` and the position in `x`, or `bits`:
    int64 of 32 random bits, broadcastable to `x`; the mean is kept to 2**-24 of a spacing.
    ValueError for another dtype, an unknown format or rounding.
    """
    target = format if isinstance(format, Format) else format_named(format)
    carrier = _CARRIERS.get(x.dtype)
    if carrier is None:
        raise ValueError(f"round_to: x must be float32 or float64, got {x.dtype}; convert it first")
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"round_to: rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}"
        )
    if target.changes_nothing(carrier):
        return x
    if rounding == "stochastic" and bits is None:
        positions = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        bits = bits_at(seed, positions >> 32, positions & 0xFFFFFFFF)
    if target.saturate:
        # Before the rounding, so that infinity comes down too; clamp lets NaN through.
        largest = target.largest_in(carrier)
        x = x.clamp(-largest, largest)
    rounded = _round_unlimited(x, target, rounding, bits)
    if target.subnormals:
        return rounded
    # After the rounding: a value just below the smallest normal one may round up to it and stay.
    zero = torch.copysign(torch.zeros_like(rounded), rounded)
    return torch.where(rounded.abs() < 2.0**target.min_exponent, zero, rounded)


def round_into(x: Tensor, format: str | Format, dtype: torch.dtype) -> Tensor:
    """Round `x`, of any dtype of INPUT_DTYPES, once to nearest in `format`, carried in `dtype`.

    The way into the work format and out of it: FP64 inputs are rounded before they are narrowed
    and results before they are stored, so that no value is rounded twice. `dtype` must hold every
    value of `format`.
    """
    widest = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    return round_to(x.to(widest), format).to(dtype)


def _round_unlimited(x: Tensor, target: Format, rounding: str, bits: Tensor | None) -> Tensor:
    """Round to `target` as if it had subnormals and did not saturate, by the quickest way."""
    shape = target.exponent_bits, target.mantissa_bits
    if rounding == "nearest_even" and target.infinities and shape in _CASTS[x.dtype]:
        return x.to(_CASTS[x.dtype][shape]).to(x.dtype)
    # A subnormal of FP32 is a normal value of a format with more exponent bits, and has fewer bits
    # to drop there than its own bit pattern says. In FP64 it is normal too.
    wide = x.double() if target.exponent_bits > 8 else x
    carrier = _CARRIERS[wide.dtype]
    if target.infinities and target.exponent_bits == carrier.exponent_bits:
        dropped = carrier.mantissa_bits - target.mantissa_bits
        return round_last_bits(wide, dropped, rounding, bits).to(x.dtype)
    rounded = round_on_grid(x.double(), target.min_exponent, target.mantissa_bits, rounding, bits)
    beyond = torch.inf if target.infinities else torch.nan
    # The grid has no end of its own; past the largest value only rounding toward zero comes back.
    if rounding == "toward_zero":
        largest = target.largest_in(_CARRIERS[x.dtype])
        rounded.clamp_(-largest, largest).masked_fill_(x.isinf(), beyond)
    else:
        rounded.masked_fill_(rounded.abs() > target.max_value, beyond)
    return rounded.copysign_(x).to(x.dtype)


def round_last_bits(x: Tensor, dropped: int, rounding: str, random: Tensor | None) -> Tensor:
    """Round FP32 or FP64 values to a grid with `dropped` fewer mantissa bits.

    A carry runs into the exponent, and on to infinity. `random`, int64 of 32 random bits, is read
    where `rounding` is stochastic.
    """
    if dropped <= 0:
        return x
    bits = x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)
    # IEEE magnitudes are ordered as their bits are, so a carry out of the mantissa lands on the
    # next binade by itself, whatever is added here.
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
        # Rounds up where the dropped bits exceed the random ones. 24 of the 32 bits decide, here as
        # on the grid and in the kernels, so that all three agree to the bit.
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
    scaled.div_(quantum)  # exact: quantum is a power of two, and scaled is x in steps of the grid
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
