"""Two ways to round a tensor to a floating-point grid that is given by integers.

`round_last_bits` adds to the bits of a value and cuts the last ones off: for a grid with the
exponents of the dtype. `round_on_grid` divides by the spacing of the grid around a value, a power
of two, in FP64, where the quotient and its fraction are exact: for a grid of smaller range. Neither
knows where a format ends. Leaves out the names of formats, and the choice of the way (`formats`).

Number formats and the one way to round to them.

A value is rounded once and keeps the dtype that carries it: `round_to(x, "bf16")` of an FP32 tensor
is an FP32 tensor whose values lie on the BF16 grid. The named formats are the IEEE 754 ones, TF32,
BF16, and the two of "FP8 Formats for Deep Learning" (arXiv 2209.05433); any other is written
`eXmY`, with X exponent and Y mantissa bits, IEEE-like: the top exponent is infinity and NaN. Two
endings, in this order, change a format: `e5m10-flush` has no subnormals (a result below the
smallest normal value becomes zero, as on hardware that flushes), `e4m3-saturate` ends at its
largest value: what is beyond, infinity too, becomes that.

Three ways lead to the same bits, the quickest first. FP32 goes to BF16 and FP16, and FP64 to FP32,
by torch's cast, a single correct rounding. FP64 does not go so to BF16 and FP16: torch casts it
through FP32, and 1 + 2**-8 + 2**-40, rounded twice, becomes 1.0 in BF16 (the nearest is 1.0078125).
Nor does FP8: torch 2.11 casts what is beyond e4m3 to NaN, torch 2.13 to the largest value. The two
other ways are in `rounding`. Leaves out anything that knows about attention.
"""

import difflib
import functools
import math
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
    "round_last_bits",
    "round_on_grid",
    "round_to",
]

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
_CASTS = {torch.float64: (torch.float32,), torch.float32: (torch.float16, torch.bfloat16)}
_NAME = re.compile(
    r"(?P<stem>[a-z]+\d+|e(?P<exponent>0|[1-9]\d*)m(?P<mantissa>0|[1-9]\d*))"
    r"(?P<flush>-flush)?(?P<saturate>-saturate)?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: sign, `exponent_bits`, `mantissa_bits` stored bits.

    `subnormals=False` makes zero of results below the smallest normal value; `saturate=True` makes
    the largest value of results beyond it. `infinities=False` is the "fn" encoding of e4m3, whose
    top exponent holds numbers too: there results beyond the largest value become NaN. ValueError
    unless FP64 holds the format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    subnormals: bool = True
    saturate: bool = False
    infinities: bool = True

    def __post_init__(self) -> None:
        most = 11 if self.infinities else 10  # what FP64 holds
        for what, low, high in (("exponent_bits", 2, most), ("mantissa_bits", 1, 52)):
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
        return self._largest(self.mantissa_bits)

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of torch that stores exactly this format, if there is one."""
        plain = self.subnormals and not self.saturate
        encoded = self.infinities == ((self.exponent_bits, self.mantissa_bits) != (4, 3))
        key = (self.exponent_bits, self.mantissa_bits)
        return _DTYPES.get(key) if plain and encoded else None

    @property
    def container(self) -> torch.dtype:
        """The dtype that values on this grid are kept in as an operand of a dot product.

        The narrowest that holds them all; BF16 before FP16, so that an FP8 operand meets one in
        BF16 in the same dtype.
        """
        dtypes = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
        return next(d for d in dtypes if self.fits(FORMATS[INPUT_DTYPES[d]]))

    def fits(self, wider: "Format") -> bool:
        """Say whether `wider` holds every finite value of this format."""
        quantum = self.min_exponent - self.mantissa_bits
        smallest = quantum if self.subnormals else self.min_exponent
        return (
            self.mantissa_bits <= wider.mantissa_bits
            and self.max_value <= wider.max_value
            and quantum >= wider.min_exponent - wider.mantissa_bits
            and (wider.subnormals or smallest >= wider.min_exponent)
        )

    def changes_nothing(self, carrier: "Format") -> bool:
        """Say whether every value that `carrier` holds, infinities too, rounds to itself."""
        return self.infinities and not self.saturate and carrier.fits(self)

    def largest_in(self, carrier: "Format") -> float:
        """Return the largest value of this format that `carrier` holds.

        Infinity if the format goes on where the carrier ends: then nothing is beyond it.
        """
        largest = self._largest(min(self.mantissa_bits, carrier.mantissa_bits))
        return largest if largest <= carrier.max_value else math.inf

    def _largest(self, mantissa_bits: int) -> float:
        steps = 1 if self.infinities else 2
        return (2.0 - steps * 2.0**-mantissa_bits) * 2.0**self.max_exponent


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
    """Return the format called `name`: one of FORMATS or `eXmY`, and its endings.

    ValueError with the nearest names otherwise.
    """
    written = _NAME.fullmatch(str(name))
    if not written or (written["exponent"] is None and written["stem"] not in FORMATS):
        near = difflib.get_close_matches(str(name), FORMATS, n=3, cutoff=0.4) or list(FORMATS)
        raise ValueError(
            f"format_named: name must be a known format or eXmY, then -flush and -saturate if "
            f"wanted, got {name!r}; nearest: {', '.join(near)}"
        )
    endings = {"subnormals": not written["flush"], "saturate": bool(written["saturate"])}
    if written["stem"] in FORMATS:
        return replace(FORMATS[written["stem"]], name=name, **endings)
    bits = {"exponent_bits": int(written["exponent"]), "mantissa_bits": int(written["mantissa"])}
    return Format(name=name, **bits, **endings)


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
    if x.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"round_to: x must be float32 or float64, got {x.dtype}; convert it first")
    if rounding not in ROUNDINGS:
        raise ValueError(
            f"round_to: rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}"
        )
    carrier = FORMATS[INPUT_DTYPES[x.dtype]]
    if target.changes_nothing(carrier):
        return x
    if rounding == "stochastic" and bits is None:
        positions = torch.arange(x.numel(), device=x.device).reshape(x.shape)
        bits = bits_at(seed, positions >> 32, positions & 0xFFFFFFFF)
    if target.saturate:
        largest = target.largest_in(carrier)
        x = x.clamp(-largest, largest)
    rounded = _round_unlimited(x, target, rounding, bits)
    if target.subnormals:
        return rounded
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
    plain = replace(target, subnormals=True, saturate=False)
    if rounding == "nearest_even" and plain.dtype in _CASTS[x.dtype]:
        return x.to(plain.dtype).to(x.dtype)
    wide = x.double() if plain.exponent_bits > 8 else x
    carrier = FORMATS[INPUT_DTYPES[wide.dtype]]
    if plain.infinities and plain.exponent_bits == carrier.exponent_bits:
        dropped = carrier.mantissa_bits - plain.mantissa_bits
        return round_last_bits(wide, dropped, rounding, bits).to(x.dtype)
    rounded = round_on_grid(x.double(), plain.min_exponent, plain.mantissa_bits, rounding, bits)
    beyond = torch.inf if plain.infinities else torch.nan
    if rounding == "toward_zero":
        largest = plain.largest_in(FORMATS[INPUT_DTYPES[x.dtype]])
        rounded.clamp_(-largest, largest).masked_fill_(x.isinf(), beyond)
    else:
        rounded.masked_fill_(rounded.abs() > plain.max_value, beyond)
    return rounded.copysign_(x).to(x.dtype)
