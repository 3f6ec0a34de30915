"""Number formats and the one way to round to them.

A value is rounded once and keeps the dtype that carries it: `round_to(x, "bf16")` of an FP32 tensor
is an FP32 tensor whose values lie on the BF16 grid. The named formats are the IEEE 754 ones, TF32,
BF16, and the two of "FP8 Formats for Deep Learning" (arXiv 2209.05433); any other is written
`eXmY`, with X exponent and Y mantissa bits, IEEE-like: the top exponent is infinity and NaN. Two
endings change a format: `e5m10-flush` has no subnormals (a result below the smallest normal value
becomes zero, as on hardware that flushes), `e4m3-saturate` ends at its largest value.

FP32 carriers round to a dtype of torch by torch's cast, which is a single correct rounding. FP64
carriers do not: torch casts FP64 to BF16 and FP16 through FP32, so a value can be rounded twice and
land on the wrong neighbour (1 + 2**-8 + 2**-40 becomes 1.0 in BF16; the nearest is 1.0078125).
There, and for all that torch has no dtype for, the grid is built explicitly in FP64: x / quantum is
exact because the quantum is a power of two. Leaves out anything that knows about attention.
"""

import difflib
import functools
import re
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attention_kernels.random_bits import bits_at

__all__ = [
    "FORMATS",
    "INPUT_DTYPES",
    "ROUNDINGS",
    "Format",
    "format_named",
    "round_into",
    "round_to",
]

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "away", "stochastic")
"""To the nearest value (ties to even, or away from zero), to the neighbour nearer to zero, to the
one farther from it, or to either with a probability that keeps the mean (24 random bits)."""

INPUT_DTYPES = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
"""The dtypes that q, k and v may have, with the names of their formats."""

_DTYPES = {
    (11, 52): torch.float64,
    (8, 23): torch.float32,
    (8, 7): torch.bfloat16,
    (5, 10): torch.float16,
    (5, 2): torch.float8_e5m2,
    (4, 3): torch.float8_e4m3fn,
}
_MAX_EXPONENT_BITS, _MAX_MANTISSA_BITS = 11, 52


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: sign, `exponent_bits`, `mantissa_bits` stored bits.

    `subnormals=False` makes zero of results below the smallest normal value; `saturate=True` makes
    the largest value of results beyond it. `infinities=False` is the "fn" encoding of e4m3, whose
    top exponent holds numbers too: there results beyond the largest value become NaN. ValueError
    for fewer than 2 or more than 11 exponent bits, or fewer than 1 or more than 52 mantissa bits.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    subnormals: bool = True
    saturate: bool = False
    infinities: bool = True

    def __post_init__(self) -> None:
        for what, low, high in (
            ("exponent_bits", 2, _MAX_EXPONENT_BITS),
            ("mantissa_bits", 1, _MAX_MANTISSA_BITS),
        ):
            if not low <= getattr(self, what) <= high:
                raise ValueError(
                    f"Format: {what} must be from {low} to {high}, got {getattr(self, what)} "
                    f"in {self.name!r}; FP64 is e11m52"
                )

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal value."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite value."""
        return 2 ** (self.exponent_bits - 1) - int(self.infinities)

    @property
    def max_value(self) -> float:
        """Largest finite value; the fn encoding gives its last mantissa to NaN."""
        steps = 1 if self.infinities else 2
        return (2.0 - steps * 2.0**-self.mantissa_bits) * 2.0**self.max_exponent

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of torch that stores exactly this format, if there is one."""
        plain = self.subnormals and not self.saturate
        encoded = self.infinities == ((self.exponent_bits, self.mantissa_bits) != (4, 3))
        key = (self.exponent_bits, self.mantissa_bits)
        return _DTYPES.get(key) if plain and encoded else None

    def fits(self, wider: "Format") -> bool:
        """Say whether `wider` holds every finite value of this format."""
        quantum = self.min_exponent - self.mantissa_bits
        return (
            self.mantissa_bits <= wider.mantissa_bits
            and self.max_exponent <= wider.max_exponent
            and quantum >= wider.min_exponent - wider.mantissa_bits
        )


FORMATS = {
    f.name: f
    for f in (
        Format(name="fp64", exponent_bits=11, mantissa_bits=52),
        Format(name="fp32", exponent_bits=8, mantissa_bits=23),
        Format(name="tf32", exponent_bits=8, mantissa_bits=10),
        Format(name="bf16", exponent_bits=8, mantissa_bits=7),
        Format(name="fp16", exponent_bits=5, mantissa_bits=10),
        Format(name="e4m3", exponent_bits=4, mantissa_bits=3, infinities=False),
        Format(name="e5m2", exponent_bits=5, mantissa_bits=2),
    )
}


@functools.cache
def format_named(name: str) -> Format:
    """Return the format called `name`: one of FORMATS or `eXmY`, each with `-flush`, `-saturate`.

    ValueError with the nearest names otherwise.
    """
    stem, *endings = str(name).split("-")
    written = re.fullmatch(r"e(\d{1,2})m(\d{1,2})", stem)
    if (stem not in FORMATS and not written) or set(endings) - {"flush", "saturate"}:
        near = difflib.get_close_matches(str(name), FORMATS, n=3, cutoff=0.4) or list(FORMATS)
        raise ValueError(
            f"format_named: name must be a known format or eXmY, with -flush or -saturate if "
            f"wanted, got {name!r}; nearest: {', '.join(near)}"
        )
    if stem in FORMATS:
        format = FORMATS[stem]
    else:
        assert written
        format = Format(
            name=stem, exponent_bits=int(written[1]), mantissa_bits=int(written[2])
        )
    flush, saturate = "flush" in endings, "saturate" in endings
    return replace(format, name=name, subnormals=not flush, saturate=saturate)


def round_to(
    x: Tensor,
    format: str | Format,
    rounding: str = "nearest_even",
    *,
    seed: int = 0,
    bits: Tensor | None = None,
) -> Tensor:
    """Round each value of `x` once to `format`.

    `x` is FP32 or FP64, any shape; the result has its dtype and shape. `rounding` is one of
    ROUNDINGS. Values that round beyond the range become infinite as IEEE 754 says (NaN where the
    format has no infinity, the largest value where it saturates). A format at least as wide as the
    carrier changes nothing. `stochastic` takes its random bits from `seed` and the position in
    `x`, or `bits`: int64 of 32 random bits, broadcastable to `x`. ValueError for another dtype, an
    unknown format or rounding.
    """
    target = format if isinstance(format, Format) else format_named(format)
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"round_to: x must be float32 or float64, got {x.dtype}; convert it first")
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"round_to: rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}"
        )
    if FORMATS[INPUT_DTYPES[x.dtype]].fits(target) and target.subnormals:
        return x
    if rounding == "nearest_even":
        return _round_nearest_even(x, target)
    if rounding == "stochastic" and bits is None:
        positions = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        bits = bits_at(seed, positions >> 32, positions & 0xFFFFFFFF)
    return _round_on_grid(x.double(), target, rounding, bits).to(x.dtype)


def round_into(x: Tensor, format: str | Format, dtype: torch.dtype) -> Tensor:
    """Round `x`, of any dtype of INPUT_DTYPES, once to nearest in `format`, carried in `dtype`.

    The way into the work format and out of it: FP64 inputs are rounded before they are narrowed
    and results before they are stored, so that no value is rounded twice. `dtype` must hold every
    value of `format`.
    """
    widest = torch.promote_types(torch.promote_types(x.dtype, dtype), torch.float32)
    return round_to(x.to(widest), format).to(dtype)


def _round_nearest_even(x: Tensor, target: Format) -> Tensor:
    """Round by the quickest way that rounds once."""
    if target.dtype is not None and (x.dtype == torch.float32 or target.name == "fp32"):
        return x.to(target.dtype).to(x.dtype)
    if x.dtype == torch.float32 and target.exponent_bits == 8 and target.subnormals:
        if not target.saturate:
            return _round_fp32_bits(x, target.mantissa_bits)
    return _round_on_grid(x.double(), target, "nearest_even", None).to(x.dtype)


def _round_fp32_bits(x: Tensor, mantissa_bits: int) -> Tensor:
    """Drop the last bits of FP32 values; a carry runs into the exponent and on to infinity."""
    dropped = 23 - mantissa_bits
    bits = x.view(torch.int32)
    even = bits + ((1 << (dropped - 1)) - 1) + ((bits >> dropped) & 1)
    # The carry of a NaN with a full payload would run into the sign.
    return torch.where(x.isnan(), x, (even & -(1 << dropped)).view(torch.float32))


def _round_on_grid(x: Tensor, target: Format, rounding: str, bits: Tensor | None) -> Tensor:
    """Round FP64 values; x in units of the last place is exact, and so is its fraction."""
    magnitude = x.abs()
    exponent = torch.frexp(magnitude).exponent.sub_(1).clamp_(min=target.min_exponent)
    quantum = torch.ldexp(torch.ones_like(x), exponent - target.mantissa_bits)
    scaled = magnitude / quantum
    if rounding == "nearest_even":
        kept = torch.round(scaled)
    else:
        kept = torch.floor(scaled)
        kept += _goes_up(scaled - kept, rounding, bits)
    rounded = kept.mul_(quantum)
    if not target.subnormals:
        rounded = rounded.masked_fill(rounded < 2.0**target.min_exponent, 0.0)
    beyond = rounded > target.max_value
    if target.saturate or rounding == "toward_zero":
        limit = target.max_value
    else:
        limit = torch.inf if target.infinities else torch.nan
    rounded = rounded.masked_fill(beyond, limit)
    infinite = target.max_value if target.saturate else torch.inf
    if not (target.infinities or target.saturate):
        infinite = torch.nan
    rounded = rounded.masked_fill(magnitude == torch.inf, infinite)
    return torch.where(x.isnan(), x, torch.copysign(rounded, x))


def _goes_up(fraction: Tensor, rounding: str, bits: Tensor | None) -> Tensor:
    """Say where a magnitude goes to the upper neighbour, given its distance from the lower one."""
    if rounding == "toward_zero":
        return torch.zeros_like(fraction, dtype=torch.bool)
    if rounding == "away":
        return fraction > 0
    if rounding == "nearest_away":
        return fraction >= 0.5
    assert bits is not None
    return fraction > (bits >> 8).double() * 2.0**-24
