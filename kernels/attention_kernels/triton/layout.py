"""What a Triton kernel knows about a format while it compiles: integers, from the format's name.

Each class is one look-up, called through a `constexpr_function`: Triton lets such a function call
classes but no other function of ours. Interpreted, the same look-ups run at each call. Leaves out
the rounding itself (`triton_rounding`).
"""

import struct

import triton

from attention_kernels.formats import FORMATS, Format, format_named

__all__ = ["container_of", "layout_of"]


class _Layout:
    """A format as integers, for rounding the bits of a carrier of `width` 32 or 64 bits."""

    def __init__(self, name: str, width: int) -> None:
        target = format_named(name)
        carrier = FORMATS["fp64" if width == 64 else "fp32"]
        bias = 1 - carrier.min_exponent
        quantum = target.min_exponent - target.mantissa_bits
        self.identity = target.changes_nothing(carrier)
        self.cast = _hardware_cast(target, width)
        # The carrier: bits of its mantissa, its infinity.
        self.stored = carrier.mantissa_bits
        self.infinity = (2**carrier.exponent_bits - 1) << self.stored
        # The format: its range of exponents beside the carrier's, and where it begins.
        self.wide = target.exponent_bits > carrier.exponent_bits
        self.narrow = target.exponent_bits < carrier.exponent_bits
        self.mantissa = target.mantissa_bits
        self.first_normal = max(target.min_exponent + bias, 0)
        self.quantum = max(quantum + bias, 0) << self.stored
        self.smallest = 0 if target.subnormals else self.first_normal << self.stored
        # And where it ends.
        self.largest = _bits(target.largest_in(carrier), width)
        self.saturate = target.saturate
        nan = self.infinity + (1 << (self.stored - 1))
        self.beyond = self.infinity if target.infinities else nan


def _bits(value: float, width: int) -> int:
    number, integer = ("<d", "<q") if width == 64 else ("<f", "<i")
    return struct.unpack(integer, struct.pack(number, value))[0]


def _hardware_cast(target: Format, width: int) -> str:
    """Name the dtype whose cast, to nearest even, is the rounding to `target`; "" if none is."""
    casts = ("fp32",) if width == 64 else ("fp16", "bf16")
    return next((name for name in casts if target.dtype == FORMATS[name].dtype), "")


class _Container:
    """The name of the dtype that holds a format as an operand of a dot."""

    def __init__(self, name: str) -> None:
        dtype = format_named(name).container
        self.name = next(name for name, format in FORMATS.items() if format.dtype == dtype)


@triton.constexpr_function
def layout_of(FORMAT, WIDTH, FIELD):
    """Return one integer of a format's layout; see `_Layout`."""
    return getattr(_Layout(FORMAT, WIDTH), FIELD)


@triton.constexpr_function
def container_of(FORMAT):
    """Return "bf16", "fp16", "fp32" or "fp64": what `dot` reads values of FORMAT from."""
    return _Container(FORMAT).name
