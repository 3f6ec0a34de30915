"""Describes binary floating-point formats: bit counts, underflow and overflow, looked up by name.

The named formats are those of IEEE 754, TF32, BF16, and the two of "FP8 Formats for Deep Learning"
(arXiv 2209.05433). Every other format is written `eXmY`, with X exponent bits and Y mantissa bits,
and is IEEE-like: its top exponent is reserved for infinity and NaN. So the largest value of `e2m1`
is 3 here. The OCP format of the same name is a different one: it has no infinity, and its largest
value is 6. Only `e4m3` has the "fn" encoding, whose top exponent also holds numbers: its largest
value is 448, where an IEEE-like format with the same bits would stop at 240.

A name may carry two suffixes, in this order. `-flush`, as in `e5m10-flush`, removes the subnormals:
a result below the smallest normal value becomes zero, as on hardware that flushes. `-saturate`, as
in `e4m3-saturate`, replaces every result beyond the largest value, infinity included, by the
largest value. The suffix is part of the name because libraries differ here without saying so: torch
2.11 casts a value beyond the range of e4m3 to NaN, torch 2.13 casts it to 448.

This module does not round tensors (`rounding` does). It imports no torch, so that a command line
can check the names in a YAML file before it loads anything heavy.
"""

import difflib
import functools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

__all__ = ["FORMATS", "INPUT_FORMATS", "ROUNDINGS", "Format", "format_named", "input_format"]

ROUNDINGS = ("nearest_even", "nearest_away", "toward_zero", "away", "stochastic")
"""The rounding modes. `nearest_even` and `nearest_away` take the nearest value and differ in ties:
to the even mantissa, or away from zero. `toward_zero` and `away` always take the neighbour nearer
to zero or farther from it. `stochastic` goes away from zero with a probability that keeps the mean:
where f * 2**24 exceeds a random integer of 24 bits, f being the distance from the neighbour nearer
to zero, in units of the spacing."""

INPUT_FORMATS = {
    "torch.float64": "fp64",
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}
"""Maps each dtype that q, k and v may have, written as `str(dtype)`, to the name of its format."""

_NAME = re.compile(
    r"(?P<stem>[a-z]+\d+|e(?P<exponent>0|[1-9]\d*)m(?P<mantissa>0|[1-9]\d*))"
    r"(?P<flush>-flush)?(?P<saturate>-saturate)?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: a sign bit, `exponent_bits` and `mantissa_bits` stored bits.

    With `subnormals=False` a result below the smallest normal value becomes zero. With
    `saturate=True` a result beyond the largest value becomes the largest value. `infinities=False`
    is the "fn" encoding of e4m3, whose top exponent also holds numbers: unless it saturates, a
    result beyond its largest value becomes NaN. ValueError for bit counts that are too small, or
    so large that FP64 could not hold every value.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    subnormals: bool = True
    saturate: bool = False
    infinities: bool = True

    def __post_init__(self) -> None:
        # FP64 has 11 exponent bits and reserves its top exponent; fn uses the top one for numbers.
        most = 11 if self.infinities else 10
        for what, low, high in (("exponent_bits", 2, most), ("mantissa_bits", 1, 52)):
            if not low <= getattr(self, what) <= high:
                raise ValueError(
                    f"Format: {what} must be from {low} to {high}, got {getattr(self, what)} "
                    f"in {self.name!r}; FP64 is e11m52"
                )

    @property
    def min_exponent(self) -> int:
        """Exponent e of the smallest normal value, 2**e."""
        return 2 - 2 ** (self.exponent_bits - 1)

    @property
    def max_exponent(self) -> int:
        """Exponent e of the largest finite value, which lies in [2**e, 2**(e + 1))."""
        return 2 ** (self.exponent_bits - 1) - int(self.infinities)

    @property
    def max_value(self) -> float:
        """Largest finite value. In the fn encoding the all-ones mantissa there is NaN."""
        return self._largest(self.mantissa_bits)

    @property
    def container(self) -> str:
        """Name of the dtype, by its format, that holds these values as operands of a dot product.

        It is the first of bf16, fp16, fp32 and fp64 that holds all of them. BF16 is tried before
        FP16, so that an FP8 operand has the same dtype as a BF16 one and the pair can be
        multiplied on tensor cores, which take two operands of one 16-bit dtype.
        """
        return next(name for name in ("bf16", "fp16", "fp32", "fp64") if self.fits(FORMATS[name]))

    def fits(self, wider: "Format") -> bool:
        """Say whether `wider` holds every finite value of this format."""
        # Both are exponents: of the smallest spacing, and of the smallest positive value.
        quantum = self.min_exponent - self.mantissa_bits
        smallest = quantum if self.subnormals else self.min_exponent
        return (
            self.mantissa_bits <= wider.mantissa_bits
            and self.max_value <= wider.max_value
            and quantum >= wider.min_exponent - wider.mantissa_bits
            # a format that flushes holds nothing below its smallest normal value
            and (wider.subnormals or smallest >= wider.min_exponent)
        )

    def changes_nothing(self, carrier: "Format") -> bool:
        """Say whether rounding to this format leaves every value of `carrier` as it is.

        That includes infinities, which a format without them, or one that saturates, changes.
        """
        return self.infinities and not self.saturate and carrier.fits(self)

    def largest_in(self, carrier: "Format") -> float:
        """Return the largest value of this format that `carrier` holds.

        Return infinity if this format reaches beyond the largest value of `carrier`: then no finite
        value of `carrier` can overflow it.
        """
        largest = self._largest(min(self.mantissa_bits, carrier.mantissa_bits))
        # cut to the carrier's bits first: it may not hold the format's own largest value
        return largest if largest <= carrier.max_value else math.inf

    def _largest(self, mantissa_bits: int) -> float:
        # In the fn encoding the last mantissa at the top exponent is NaN, so one step is lost.
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
    """Return the format called `name`: one of FORMATS or `eXmY`, with or without suffixes.

    ValueError, with the nearest names, for any other name.
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


def input_format(dtype: "torch.dtype") -> str:
    """Return the name of the format of `dtype`; ValueError if q, k and v can't have that dtype."""
    # by its text, as this module imports no torch
    name = INPUT_FORMATS.get(str(dtype))
    if name is None:
        allowed = ", ".join(INPUT_FORMATS.values())
        raise ValueError(f"input_format: dtype must be one of {allowed}, got {dtype}")
    return name
