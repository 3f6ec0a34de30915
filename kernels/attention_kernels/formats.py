"""Describes binary floating-point formats: bit counts, underflow and overflow, looked up by name.

FORMATS is the table that tensors (`rounding`) and kernels (`triton.rounding`) both read. It holds
the formats of IEEE 754, TF32, BF16, those of 8 bits (arXiv 2209.05433; the fnuz ones are of arXiv
2206.02915), and the elements of OCP's Microscaling specification (MX v1.0): `e2m1`, `e2m3` and
`e3m2` have neither infinity nor NaN, and end at 6, 7.5 and 28. Every other format is written
`eXmY`, with X exponent bits and Y mantissa bits, and is IEEE-like: its top exponent is reserved for
infinity and NaN. `-ieee` gives the IEEE-like format where the bare name means another one:
`e4m3-ieee` ends at 240, `e2m1-ieee` at 3.

A name may carry two suffixes, in this order. `-flush`, as in `e5m10-flush`, removes the subnormals:
a result below the smallest normal value becomes zero, as on hardware that flushes. `-saturate`, as
in `e4m3-saturate`, replaces every result beyond the largest value, infinity included, by the
largest value. The suffix is part of the name because libraries differ here without saying so: torch
2.11 casts a value beyond the range of e4m3 to NaN, torch 2.13 casts it to 448. A format that has
neither infinity nor NaN always saturates, as the MX specification asks. A NaN stays NaN, although
such a format has no pattern for it: an emulation that made a number of it would hide the fault.

`e8m0`, the scales of MX blocks, is no format to round to: it has powers of two and NaN, no sign and
no zero (`block_scaling`). This module does not round tensors (`rounding` does). It imports no
torch, so that a command line can check the names in a YAML file before it loads anything heavy.
"""

import difflib
import functools
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENCODINGS",
    "FORMATS",
    "INPUT_FORMATS",
    "ROUNDINGS",
    "Encoding",
    "Format",
    "format_named",
    "input_format",
]

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

# Stands for IEEE's bias, which depends on the number of exponent bits.
_IEEE_BIAS = -(2**31)

_NAME = re.compile(
    r"(?P<stem>[a-z]+\d+|"
    r"e(?P<exponent>0|[1-9]\d*)m(?P<mantissa>0|[1-9]\d*)(?P<kind>[a-z]\w*|-ieee)?)"
    r"(?P<flush>-flush)?(?P<saturate>-saturate)?",
    re.ASCII,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoding:
    """What the bit patterns at the top of a format and at minus zero mean."""

    reserved: str
    """What of the top exponent is no number: the `exponent` (infinity, and NaN for every other
    mantissa), its last `pattern` (NaN), or `nothing`."""
    negative_zero: bool = True
    """Whether zero has a sign. In `fnuz` the pattern of minus zero is the one NaN instead."""
    nan: bool = True
    """Whether a pattern is NaN. A format without one has no infinity either, and saturates."""


ENCODINGS = {
    "ieee": Encoding(reserved="exponent"),
    "fn": Encoding(reserved="pattern"),
    "fnuz": Encoding(reserved="nothing", negative_zero=False),
    "finite": Encoding(reserved="nothing", nan=False),
    "int": Encoding(reserved="nothing", nan=False, negative_zero=False),
}
"""The encodings by name. `fn` is "finite, and NaN", `fnuz` the same with "unsigned zero". `int` is
two's complement: with one exponent bit the spacing is the same everywhere, so the values without
the most negative one are those of a floating-point format."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Format:
    """A binary floating-point format: a sign bit, `exponent_bits` and `mantissa_bits` stored bits.

    `encoding` is a name of ENCODINGS. `bias` is what is subtracted from a stored exponent; left
    out, it is IEEE's, 2**(exponent_bits - 1) - 1. With `subnormals=False` a result below the
    smallest normal value becomes zero. With `saturate=True` a result beyond the largest value
    becomes the largest value; otherwise it becomes infinity, or NaN if the encoding has no
    infinity. ValueError for bit counts that are too small, or so large that FP64 could not hold
    every value; for another bias than IEEE's that leads out of the range of FP32; and for an
    encoding without infinity and NaN that does not saturate.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    encoding: str = "ieee"
    bias: int = _IEEE_BIAS
    subnormals: bool = True
    saturate: bool = False

    def __post_init__(self) -> None:
        if self.encoding not in ENCODINGS:
            known = ", ".join(ENCODINGS)
            raise ValueError(f"Format: encoding must be one of {known}, got {self.encoding!r}")
        usual = 2 ** (self.exponent_bits - 1) - 1
        if self.bias == _IEEE_BIAS:
            object.__setattr__(self, "bias", usual)
        self._check_bits()
        # The roundings tell by the bits whether a format has the exponents of its carrier.
        if self.bias != usual and not (self.min_exponent > -126 and self.max_exponent < 128):
            raise ValueError(
                f"Format: bias must keep the exponents within FP32's, got {self.bias} in "
                f"{self.name!r}, whose exponents are from {self.min_exponent} to "
                f"{self.max_exponent}"
            )
        if not (self.saturate or ENCODINGS[self.encoding].nan):
            raise ValueError(
                f"Format: saturate must be true in the encoding {self.encoding!r}, which has "
                f"neither infinity nor NaN, got {self.saturate} in {self.name!r}"
            )
        if self.encoding == "int" and not self.subnormals:
            raise ValueError(
                f"Format: subnormals must be true in the encoding 'int', whose values have one "
                f"spacing, got {self.subnormals} in {self.name!r}"
            )

    def _check_bits(self) -> None:
        # FP64 has 11 exponent bits and reserves its top exponent; others use the top one for
        # numbers. An IEEE-like format of one exponent bit would have no normal numbers.
        least, most = (2, 11) if self.infinities else (1, 10)
        for what, low, high in (("exponent_bits", least, most), ("mantissa_bits", 1, 52)):
            if not low <= getattr(self, what) <= high:
                raise ValueError(
                    f"Format: {what} must be from {low} to {high}, got {getattr(self, what)} "
                    f"in {self.name!r}; FP64 is e11m52"
                )

    @property
    def infinities(self) -> bool:
        """Whether the format has infinities."""
        return ENCODINGS[self.encoding].reserved == "exponent"

    @property
    def negative_zero(self) -> bool:
        """Whether zero has a sign."""
        return ENCODINGS[self.encoding].negative_zero

    @property
    def min_exponent(self) -> int:
        """Exponent e of the smallest normal value, 2**e."""
        return 1 - self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent e of the largest finite value, which lies in [2**e, 2**(e + 1))."""
        return 2**self.exponent_bits - 1 - self.bias - int(self.infinities)

    @property
    def max_value(self) -> float:
        """Largest finite value."""
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

        That includes infinities, which a format without them, or one that saturates, changes. A
        format without infinities is the only kind that may lack the sign of zero.
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

    def value_of(self, pattern: int) -> float:
        """Return the value that the bits of `pattern` stand for, sign first, mantissa last.

        ValueError for a pattern that has more bits than the format.
        """
        size = 1 + self.exponent_bits + self.mantissa_bits
        if not 0 <= pattern < 2**size:
            raise ValueError(
                f"Format: pattern must be from 0 to {2**size - 1}, the {size} bits of "
                f"{self.name}, got {pattern}"
            )
        sign, magnitude = divmod(pattern, 2 ** (size - 1))
        power = self.min_exponent - self.mantissa_bits
        if self.encoding == "int":
            return math.ldexp(magnitude - sign * 2 ** (size - 1), power)
        if sign and not magnitude and not self.negative_zero:
            return math.nan
        exponent, mantissa = divmod(magnitude, 2**self.mantissa_bits)
        if exponent:
            mantissa, power = mantissa + 2**self.mantissa_bits, power + exponent - 1
        # Patterns are ordered as values are, so what is reserved lies beyond the largest value.
        # Quarters are compared, since no float holds what lies beyond the largest one of FP64.
        if math.ldexp(mantissa, power - 2) > self.max_value / 4:
            is_infinity = self.infinities and mantissa == 2**self.mantissa_bits
            value = math.inf if is_infinity else math.nan
        else:
            value = math.ldexp(mantissa, power)
        return math.copysign(value, -1.0) if sign else value

    def _largest(self, mantissa_bits: int) -> float:
        # In the fn encoding the last mantissa at the top exponent is NaN, so one step is lost.
        steps = 2 if ENCODINGS[self.encoding].reserved == "pattern" else 1
        return (2.0 - steps * 2.0**-mantissa_bits) * 2.0**self.max_exponent


def _table(*rows: tuple[str, int, int, dict[str, Any]]) -> dict[str, Format]:
    return {
        name: Format(name=name, exponent_bits=exponent, mantissa_bits=mantissa, **others)
        for name, exponent, mantissa, others in rows
    }


_FINITE = {"encoding": "finite", "saturate": True}

FORMATS = _table(
    ("fp64", 11, 52, {}),
    ("fp32", 8, 23, {}),
    ("tf32", 8, 10, {}),
    ("bf16", 8, 7, {}),
    ("fp16", 5, 10, {}),
    ("e4m3", 4, 3, {"encoding": "fn"}),
    ("e5m2", 5, 2, {}),
    ("e4m3fnuz", 4, 3, {"encoding": "fnuz", "bias": 8}),
    ("e5m2fnuz", 5, 2, {"encoding": "fnuz", "bias": 16}),
    ("e4m3b11fnuz", 4, 3, {"encoding": "fnuz", "bias": 11}),
    ("e3m2", 3, 2, _FINITE),
    ("e2m3", 2, 3, _FINITE),
    ("e2m1", 2, 1, _FINITE),
    # MX v1.0's INT8: multiples of 1/64; its most negative pattern, -2, may be left unused, and is
    ("int8", 1, 6, {"encoding": "int", "bias": 1, "saturate": True}),
    ("e4m3-ieee", 4, 3, {}),
    ("e3m2-ieee", 3, 2, {}),
    ("e2m3-ieee", 2, 3, {}),
    ("e2m1-ieee", 2, 1, {}),
)
"""The named formats. Where `-ieee` ends a name, the bare name has another encoding."""


@functools.cache
def format_named(name: str) -> Format:
    """Return the format called `name`: one of FORMATS or `eXmY`, with or without suffixes.

    ValueError, with the nearest names, for any other name.
    """
    written = _NAME.fullmatch(str(name))
    if str(name) == "e8m0":
        raise ValueError(
            "format_named: e8m0 holds the scales of blocks and no value is rounded to it, got "
            "'e8m0'; ask for the blocks, such as mxfp8"
        )
    is_known = written and written["stem"] in FORMATS
    # an ending of an eXmY, such as fnuz, is known only where the table has that name
    if not written or not (is_known or (written["exponent"] and not written["kind"])):
        near = difflib.get_close_matches(str(name), FORMATS, n=3, cutoff=0.4) or list(FORMATS)
        raise ValueError(
            f"format_named: name must be a known format or eXmY, then -flush and -saturate if "
            f"wanted, got {name!r}; nearest: {', '.join(near)}"
        )
    endings: dict[str, Any] = {
        "subnormals": not written["flush"],
        "saturate": bool(written["saturate"]),
    }
    if is_known:
        known = FORMATS[written["stem"]]
        endings["saturate"] |= known.saturate
        return replace(known, name=name, **endings)
    bits: dict[str, Any] = {
        "exponent_bits": int(written["exponent"]),
        "mantissa_bits": int(written["mantissa"]),
    }
    return Format(name=name, **bits, **endings)


def input_format(dtype: "torch.dtype") -> str:
    """Return the name of the format of `dtype`; ValueError if q, k and v can't have that dtype."""
    # by its text, as this module imports no torch
    name = INPUT_FORMATS.get(str(dtype))
    if name is None:
        allowed = ", ".join(INPUT_FORMATS.values())
        raise ValueError(f"input_format: dtype must be one of {allowed}, got {dtype}")
    return name
