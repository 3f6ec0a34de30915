"""Units in the last place: the spacing of a format's grid at a value.

Powers of two are made from the bits of FP64: `torch.ldexp` raises 2 in FP32, so it overflows at
2^128, and `torch.frexp` gives zero the exponent of 0.5. Leaves out averages over tensors
(`deviation`).
"""

import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named

__all__ = ["signed_ulp_error", "ulp_distance", "ulp_size"]

_FP64_MANTISSA_BITS, _FP64_BIAS, _FP64_EXPONENT_MASK = 52, 1023, 0x7FF

_ORDERED = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def ulp_size(x: Tensor, format: str | Format) -> Tensor:
    """Return the spacing of `format` at |x|, in FP64 and the shape of x; x is taken as FP64.

    In [2^e, 2^(e+1)) it is 2^(e - mantissa_bits). Below the smallest normal value, zero included,
    it is the spacing of the subnormals; beyond the largest value, the spacing just below that.
    NaN and infinity give NaN.
    """
    target = format if isinstance(format, Format) else format_named(format)
    x64 = x.detach().double()
    exponent = (x64.view(torch.int64) >> _FP64_MANTISSA_BITS) & _FP64_EXPONENT_MASK
    exponent.sub_(_FP64_BIAS).clamp_(min=target.min_exponent, max=1 - target.min_exponent)
    power = (exponent.add_(_FP64_BIAS) << _FP64_MANTISSA_BITS).view(torch.float64)
    return torch.where(torch.isfinite(x64), power * 2.0**-target.mantissa_bits, torch.nan)


def signed_ulp_error(x: Tensor, reference: Tensor, format: str | Format) -> Tensor:
    """Return (x - reference) in ULPs of `format` at the reference, in FP64 and their shape."""
    return (x.detach().double() - reference.detach().double()) / ulp_size(reference, format)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return how many steps on their dtype's grid lead from a to b, as int64 in their shape.

    +0 and -0 are the same value. A NaN on either side gives the largest int64, and so do FP64
    values that are further apart than that. ValueError unless both have one floating dtype.
    """
    if a.dtype != b.dtype or a.dtype not in _ORDERED:
        raise ValueError(
            f"ulp_distance: a and b must have one floating dtype, got {a.dtype} and {b.dtype}; "
            "convert the wider one"
        )
    first, second = _ordered(a), _ordered(b)
    distance = torch.maximum(first, second) - torch.minimum(first, second)
    # a negative difference has wrapped around
    unreachable = torch.isnan(a) | torch.isnan(b) | (distance < 0)
    return distance.masked_fill_(unreachable, torch.iinfo(torch.int64).max)


def _ordered(x: Tensor) -> Tensor:
    """Map values to integers that count representable values from zero."""
    integer = _ORDERED[x.dtype]
    bits = x.detach().view(integer).long()
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)
