"""Rounds each value of a tensor once to a number format, without changing the tensor's dtype.

`round_to(x, "bf16")` of an FP32 tensor is an FP32 tensor whose values lie on the BF16 grid. So what
follows a rounding point computes in FP32 or FP64, and no bit depends on how some hardware computes
in a narrow dtype.

There are three implementations. They agree to the bit, and the quickest that applies is used.

1. torch's own cast and back, where that is one correct rounding: FP32 to BF16 and FP16, FP64 to
   FP32. It is not from FP64 to BF16 or FP16: torch casts through FP32, and 1 + 2**-8 + 2**-40,
   rounded twice, becomes 1.0 in BF16 (the nearest value is 1.0078125). Nor is it used for FP8,
   whose overflow differs between versions of torch (`formats`).
2. `round_last_bits`, for a format with as many exponent bits as the dtype: it adds an integer to
   the bit pattern of a value and clears the last bits.
3. `round_on_grid`, for a format with fewer exponent bits: it divides a value by the spacing of the
   format around it and rounds to an integer. The spacing is a power of two, so the quotient is
   exact.

Neither 2 nor 3 removes subnormals or saturates: the function that calls them adds that. Both work
on bit patterns, and want numbers of a condition: on a CPU torch's operations on bool tensors take
longer (`where` with its comparison 85 us for 65,536 elements with AVX-512, an integer operation or
a comparison that returns numbers 5 to 9 us). This module does not define the formats (`formats`),
nor how a kernel rounds its blocks (`triton.rounding`).
"""

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, INPUT_FORMATS, ROUNDINGS, Format, format_named
from attention_kernels.random_bits import bits_at

__all__ = [
    "CARRIERS",
    "DTYPES",
    "INPUT_DTYPES",
    "round_into",
    "round_last_bits",
    "round_on_grid",
    "round_to",
]

INPUT_DTYPES = {
    getattr(torch, dtype.removeprefix("torch.")): name for dtype, name in INPUT_FORMATS.items()
}
"""Maps each dtype that q, k and v may have to the name of its format."""

DTYPES = {name: dtype for dtype, name in INPUT_DTYPES.items()}
"""Maps the name of each of these formats to the dtype that stores it."""

CARRIERS = {torch.float32: FORMATS["fp32"], torch.float64: FORMATS["fp64"]}
"""Maps each dtype in which a rounded value is held, its carrier, to its format."""

# Formats, as (exponent bits, mantissa bits), to which torch's cast is one correct rounding.
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

    `x` is FP32 or FP64, of any shape. The result has its dtype and shape, and is `x` itself if the
    format holds every value of that dtype. `rounding` is one of ROUNDINGS. A value that rounds
    beyond the range overflows as in IEEE 754, to infinity; it becomes NaN if the format has no
    infinity, and the largest value if the format saturates. A NaN stays NaN in every format.
    `stochastic` rounding draws its random bits from `seed` and the position in `x`, unless `bits`
    gives them: an int64 or int32 tensor with 32 random bits in each element, broadcastable to `x`.
    It keeps the mean to 2**-24 of a spacing.
    ValueError for another dtype, an unknown format or an unknown rounding.
    """
    target = format if isinstance(format, Format) else format_named(format)
    carrier = CARRIERS.get(x.dtype)
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
        # Clamped before the rounding, so that infinity too becomes the largest value; NaN stays.
        largest = target.largest_in(carrier)
        x = x.clamp(-largest, largest)
    rounded = _round_unlimited(x, target, rounding, bits)
    if not target.subnormals:
        # Flushed after the rounding, because a value just below the smallest normal one may round
        # up to it, and is then no subnormal.
        zero = torch.copysign(torch.zeros_like(rounded), rounded)
        rounded = torch.where(rounded.abs() < 2.0**target.min_exponent, zero, rounded)
    # minus zero plus zero is zero, and every other value stays
    return rounded if target.negative_zero else rounded + 0.0


def round_into(x: Tensor, format: str | Format, dtype: torch.dtype) -> Tensor:
    """Round `x` once to `format`, to nearest even, and return it in `dtype`.

    `x` has any dtype of INPUT_DTYPES, and `dtype` must hold every value of `format`. Inputs are
    brought into the work format with this function, and results into the dtype that is stored.
    It rounds in the wider of both dtypes and narrows afterwards, which is then exact, so that no
    value is rounded twice.
    """
    target = format if isinstance(format, Format) else format_named(format)
    native = _native(target)
    if native is not None and (x.dtype == native or native in _CASTS.get(x.dtype, {}).values()):
        # values that are stored so are on the grid already, and one cast rounds those of a carrier
        return x.to(native).to(dtype)
    widest = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    return round_to(x.to(widest), target).to(dtype)


def _native(target: Format) -> torch.dtype | None:
    """Return the dtype to which torch's cast is one correct rounding from its carrier, or None."""
    if target.saturate or not target.subnormals:
        return None
    shape = _ieee_shape(target)
    return next((casts[shape] for casts in _CASTS.values() if shape in casts), None)


def _ieee_shape(target: Format) -> tuple[int, int] | None:
    """Return the exponent and mantissa bits of a format in IEEE's encoding and bias, else None."""
    shape = target.exponent_bits, target.mantissa_bits
    is_ieee = target.infinities and target.bias == 2 ** (target.exponent_bits - 1) - 1
    return shape if is_ieee else None


def _round_unlimited(x: Tensor, target: Format, rounding: str, bits: Tensor | None) -> Tensor:
    """Round to `target` by the quickest implementation, but neither flush nor saturate."""
    shape = _ieee_shape(target)
    if rounding == "nearest_even" and shape in _CASTS[x.dtype]:
        return x.to(_CASTS[x.dtype][shape]).to(x.dtype)
    # A subnormal of FP32 has fewer significant bits than its bit pattern has mantissa bits. In a
    # format with more exponent bits it is a normal value, so fewer bits are dropped from it. In
    # FP64 it is normal as well, and needs no special case.
    wide = x.double() if target.exponent_bits > 8 else x
    carrier = CARRIERS[wide.dtype]
    if shape is not None and target.exponent_bits == carrier.exponent_bits:
        dropped = carrier.mantissa_bits - target.mantissa_bits
        return round_last_bits(wide, dropped, rounding, bits).to(x.dtype)
    # A spacing of the format must be a normal value of the dtype, and none of its quotients may be
    # a subnormal one, which would be inexact.
    quantum = target.min_exponent - target.mantissa_bits
    narrow = -126 <= quantum <= 0 and target.max_exponent < 127
    wide = wide if narrow else x.double()
    largest = target.largest_in(CARRIERS[x.dtype])
    return round_on_grid(wide, target, largest, rounding, bits).to(x.dtype)


def round_last_bits(x: Tensor, dropped: int, rounding: str, random: Tensor | None) -> Tensor:
    """Round FP32 or FP64 values to `dropped` fewer mantissa bits, in the range of their own dtype.

    A value that rounds beyond the largest one becomes infinite. `random` holds 32 random bits in
    each element, int64 or int32; only stochastic rounding reads it.
    """
    if dropped <= 0:
        return x
    bits, carrier = _pattern(x), CARRIERS[x.dtype]
    # IEEE magnitudes are ordered as their bit patterns are. So a carry out of the mantissa raises
    # the exponent, which gives the next binade or infinity, without a special case.
    if rounding == "nearest_even":
        added = (bits >> dropped).bitwise_and_(1).add_((1 << (dropped - 1)) - 1)
    elif rounding == "nearest_away":
        added = 1 << (dropped - 1)
    elif rounding == "toward_zero":
        added = 0
    elif rounding == "away":
        added = (1 << dropped) - 1
    else:
        assert random is not None
        # The sum carries where the dropped bits exceed the random ones. Only 24 of the 32 random
        # bits decide, as in `round_on_grid` and in the kernels, so that all three agree to the bit.
        if dropped > 24:
            chance = _chance(random).to(bits.dtype).bitwise_left_shift_(dropped - 24)
        else:
            chance = (random >> (32 - dropped)).to(bits.dtype)
        added = chance.bitwise_not_().bitwise_and_((1 << dropped) - 1)
    rounded = (bits + added).bitwise_and_(-(1 << dropped))
    # A NaN stays as it is: one whose payload is all ones would carry into its sign bit. Its
    # magnitude is above infinity's, so that the difference has no sign; all others become -1, a
    # mask of ones.
    infinity = ((1 << carrier.exponent_bits) - 1) << carrier.mantissa_bits
    size = carrier.exponent_bits + carrier.mantissa_bits
    number = (bits & ((1 << size) - 1)).sub_(infinity + 1).bitwise_right_shift_(size)
    rounded.bitwise_xor_(bits).bitwise_and_(number).bitwise_xor_(bits)
    return rounded.view(x.dtype)


def round_on_grid(
    x: Tensor, target: Format, largest: float, rounding: str, random: Tensor | None
) -> Tensor:
    """Round FP32 or FP64 values to `target`, whose spacings are normal values of that dtype.

    `largest` is where a finite value ends that is rounded toward zero; `random` is that of
    `round_last_bits`. Returns a new tensor.
    """
    bits, carrier = _pattern(x), CARRIERS[x.dtype]
    mantissa, size = carrier.mantissa_bits, carrier.exponent_bits + carrier.mantissa_bits
    exponents = (1 << size) - (1 << mantissa)
    # The clamp makes the spacing constant among the subnormals of the grid.
    quantum = (bits & exponents).clamp_(min=(target.min_exponent + carrier.bias) << mantissa)
    quantum = quantum.sub_(target.mantissa_bits << mantissa).view(x.dtype)
    # -|x| in units of the spacing; exact, since the spacing is a power of two
    scaled = (bits | -(1 << size)).view(x.dtype).div_(quantum)
    if rounding == "nearest_even":
        kept = scaled.round_()
    else:
        kept = scaled.ceil()
        kept -= _goes_up(kept - scaled, rounding, random)
    kept.mul_(quantum)
    # The grid knows no largest value. A finite value beyond it becomes the largest value if it is
    # rounded toward zero, and overflows in every other mode.
    beyond = torch.inf if target.infinities else torch.nan
    if rounding == "toward_zero":
        kept.clamp_(min=-largest).masked_fill_(x.isinf(), beyond)
    else:
        next_value = target.max_value + 2.0 ** (target.max_exponent - mantissa)
        kept = torch.threshold_(kept, -next_value, beyond)  # what is at most -next_value
    return kept.copysign_(x)


def _pattern(x: Tensor) -> Tensor:
    return x.view(torch.int64 if x.dtype == torch.float64 else torch.int32)


def _chance(random: Tensor) -> Tensor:
    """Return the 24 of 32 random bits that decide."""
    return (random >> 8).bitwise_and_(0xFFFFFF)


def _goes_up(fraction: Tensor, rounding: str, random: Tensor | None) -> Tensor:
    """Return 1 where a magnitude rounds up, else 0, in place of its `fraction`.

    `fraction` is its distance from the neighbour below, as a fraction of the spacing.
    """
    if rounding == "toward_zero":
        return fraction.zero_()
    if rounding == "away":
        return fraction.gt_(0)
    if rounding == "nearest_away":
        return fraction.ge_(0.5)
    assert random is not None
    return fraction.gt_(_chance(random).to(fraction.dtype).mul_(2.0**-24))
