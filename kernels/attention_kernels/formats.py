"""Number formats as values: a name, two bit counts, and how the format ends.

The named formats are those of IEEE 754, TF32, BF16, and the two of "FP8 Formats for Deep Learning"
(arXiv 2209.05433). Any other is written `eXmY`, X exponent and Y mantissa bits, and is IEEE-like:
the top exponent is kept for infinity and NaN. So `e2m1` written this way ends at 3; the OCP format
of that name, which has no infinity, ends at 6 and is another format. Only e4m3 has the "fn"
encoding, whose top exponent holds numbers too: it ends at 448, an IEEE-like one would end at 240.

Two endings, in this order, change a format. `e5m10-flush` has no subnormals: a result below the
smallest normal value becomes zero, as on hardware that flushes. `e4m3-saturate` ends at its largest
value: whatever lies beyond, infinity too, becomes that value. Libraries differ here without saying
so (torch 2.11 casts what is beyond e4m3 to NaN, torch 2.13 to 448), so the ending is part of the
name.

Leaves out the rounding of tensors (`rounding`). Imports no torch, so that a command line can check
the names in a YAML file before it loads anything heavy.
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
"""To the nearest value (ties to even, or away from zero), to the neighbour nearer to zero, to the
one farther from it, or to either with a probability that keeps the mean: to the farther one where
the distance from the nearer, in 2**-24 of the spacing, exceeds 24 random bits."""

INPUT_FORMATS = {
    "torch.float64": "fp64",
    "torch.float32": "fp32",
    "torch.bfloat16": "bf16",
    "torch.float16": "fp16",
}
"""The dtypes that q, k and v may have, as torch writes them, with the names of their formats."""

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
    def container(self) -> str:
        """Name of the format of the dtype that holds these values as operands of a dot product.

        The narrowest of four that holds them all. BF16 stands before FP16, so that an FP8 operand
        meets one in BF16 in the same dtype.
        """
        return next(name for name in ("bf16", "fp16", "fp32", "fp64") if self.fits(FORMATS[name]))

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


def input_format(dtype: "torch.dtype") -> str:
    """Return the name of the format that `dtype` stores; ValueError if q, k and v can't have it."""
    name = INPUT_FORMATS.get(str(dtype))
    if name is None:
        allowed = ", ".join(INPUT_FORMATS.values())
        raise ValueError(f"input_format: dtype must be one of {allowed}, got {dtype}")
    return name
