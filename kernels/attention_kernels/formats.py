"""Number formats and the one way to round to them.

A value is rounded once, to nearest with ties to even, and keeps the dtype that carries it:
`round_to(x, "bf16")` of an FP32 tensor is an FP32 tensor whose values lie on the BF16 grid.
Leaves out narrower formats, other rounding modes, and anything that knows about attention.

FP32 carriers round by torch's cast, which is a single correct rounding. FP64 carriers do not:
torch casts FP64 to BF16 and FP16 through FP32, so a value can be rounded twice and land on the
wrong neighbour (1 + 2**-8 + 2**-40 becomes 1.0 in BF16; the nearest is 1.0078125). There the grid
is built explicitly: x / quantum is exact because the quantum is a power of two, and `torch.round`
breaks ties to even.
"""

import difflib
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FORMATS", "Format", "format_named", "round_into", "round_to"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: sign, `exponent_bits`, `mantissa_bits` stored bits."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    dtype: torch.dtype

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max_value(self) -> float:
        """Largest finite value."""
        return float(torch.finfo(self.dtype).max)


FORMATS = {
    f.name: f
    for f in (
        Format(name="fp64", exponent_bits=11, mantissa_bits=52, dtype=torch.float64),
        Format(name="fp32", exponent_bits=8, mantissa_bits=23, dtype=torch.float32),
        Format(name="bf16", exponent_bits=8, mantissa_bits=7, dtype=torch.bfloat16),
        Format(name="fp16", exponent_bits=5, mantissa_bits=10, dtype=torch.float16),
    )
}


def format_named(name: str) -> Format:
    """Return the format called `name`; ValueError with the nearest names otherwise."""
    if name not in FORMATS:
        near = difflib.get_close_matches(str(name), FORMATS, n=3, cutoff=0.4) or list(FORMATS)
        raise ValueError(
            f"format_named: name must be a known format, got {name!r}; nearest: {', '.join(near)}"
        )
    return FORMATS[name]


def round_to(x: Tensor, format: str | Format) -> Tensor:
    """Round each value of `x` once to `format`, to nearest with ties to even.

    `x` is FP32 or FP64, any shape; the result has its dtype and shape. Values beyond the
    format's range become infinite as IEEE 754 says; subnormals are kept. A format at least as wide
    as the carrier changes nothing. ValueError for another dtype or an unknown format.
    """
    target = format if isinstance(format, Format) else format_named(format)
    if x.dtype == torch.float32:
        if target.dtype in (torch.float32, torch.float64):
            return x
        return x.to(target.dtype).to(torch.float32)
    if x.dtype == torch.float64:
        if target.dtype == torch.float64:
            return x
        if target.dtype == torch.float32:
            return x.to(torch.float32).to(torch.float64)
        return _round_fp64(x, target)
    raise ValueError(f"round_to: x must be float32 or float64, got {x.dtype}; convert it first")


def round_into(x: Tensor, format: str | Format, dtype: torch.dtype) -> Tensor:
    """Round `x`, of any of the formats' dtypes, once to `format` and carry it in `dtype`.

    The way into the work format and out of it: FP64 inputs are rounded before they are narrowed
    and results before they are stored, so that no value is rounded twice. `dtype` must hold every
    value of `format`.
    """
    widest = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    return round_to(x.to(widest), format).to(dtype)


def _round_fp64(x: Tensor, target: Format) -> Tensor:
    exponent = torch.frexp(x).exponent.sub_(1).clamp_(min=target.min_exponent)
    quantum = torch.ldexp(torch.ones_like(x), exponent - target.mantissa_bits)
    rounded = torch.round(x / quantum) * quantum
    overflow = rounded.abs() > target.max_value
    rounded = torch.where(overflow, torch.copysign(torch.full_like(x, torch.inf), x), rounded)
    return torch.where(torch.isfinite(x), rounded, x)
