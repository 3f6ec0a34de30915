"""Units in the last place: the spacing of a format's grid at a value.

Leaves out averages over tensors (`deviation`).
"""

import torch
from attention_kernels.formats import format_named
from torch import Tensor

__all__ = ["signed_ulp_error", "ulp_distance", "ulp_size"]

_ORDERED = {
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    torch.float32: torch.int32,
    torch.float64: torch.int64,
}


def ulp_size(x: Tensor, format: str) -> Tensor:
    """Return the spacing of `format` at |x|, in FP64 and the shape of x; x is taken as FP64.

    In [2^e, 2^(e+1)) it is 2^(e - mantissa_bits); below the smallest normal value it is the
    spacing of the subnormals. NaN and infinity give the spacing of the subnormals.
    """
    target = format_named(format)
    exponent = torch.frexp(x.double()).exponent - 1
    exponent = exponent.clamp(min=target.min_exponent) - target.mantissa_bits
    return torch.ldexp(torch.ones((), dtype=torch.float64, device=x.device), exponent)


def signed_ulp_error(x: Tensor, reference: Tensor, format: str) -> Tensor:
    """Return (x - reference) in ULPs of `format` at the reference, in FP64."""
    return (x.double() - reference.double()) / ulp_size(reference, format)


def ulp_distance(a: Tensor, b: Tensor) -> Tensor:
    """Return how many representable values lie between a and b, as int64 in their shape.

    Both have one floating dtype; +0 and -0 are the same value. ValueError for different dtypes.
    FP64 values of opposite sign may be further apart than int64 holds.
    """
    if a.dtype != b.dtype or a.dtype not in _ORDERED:
        raise ValueError(
            f"ulp_distance: a and b must have one floating dtype, got {a.dtype} and {b.dtype}"
        )
    return (_ordered(a) - _ordered(b)).abs()


def _ordered(x: Tensor) -> Tensor:
    """Map values to integers that count representable values from zero."""
    integer = _ORDERED[x.dtype]
    bits = x.contiguous().view(integer).long()
    return torch.where(bits < 0, torch.iinfo(integer).min - bits, bits)
