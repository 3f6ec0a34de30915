"""Rounding inside Triton kernels, and the arithmetic of the work format between two roundings.

`round_to` rounds a block to any format, in any rounding mode, bit for bit as `rounding.round_to`
rounds a tensor. A kernel is compiled for a format's name, which is part of its constants; while it
compiles, `layout_of` turns the name into the integers that the rounding needs.

All rounding is integer arithmetic on the bits of a value. Floating-point tricks, such as adding and
subtracting a large constant, would depend on whether the hardware flushes subnormals. The
exceptions are the casts that the hardware does itself as one correct rounding to nearest even: FP32
to BF16 and FP16, FP64 to FP32.

Between two roundings a kernel must do what its dtype says, so three operations are pinned down
here: `exponential` and `tanh` name the library function or instruction and its error, `dot` says
what becomes of FP32 operands on tensor cores, and `divide` rounds correctly, which Triton's `/`
does not.

The interpreter differs in one way. NumPy has no BF16: there it is an integer type, casts to it
truncate, and `tl.dot` multiplies the raw integers. So 16-bit operands arrive as FP32
(`arguments.kernel_inputs`), BF16 is rounded on its bits, and no block is ever narrowed.
Interpreted, `COMPILED` is False.

Leaves out where a kernel rounds (`forward`, `backward`) and which format it rounds to (`points`).
"""

# Constants are annotated as Triton wants them, which pyright takes for their type.
# pyright: reportAssignmentType=false, reportArgumentType=false

import struct
from dataclasses import replace

import triton
import triton.language as tl
from triton.language.extra import libdevice

from attention_kernels.formats import FORMATS, Format, format_named

__all__ = ["container_of", "layout_of"]


# Triton 3.6 lets a `constexpr_function` call classes, but no other function of ours: each look-up
# in the table of formats is therefore the making of an object.
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
    return next((name for name in casts if target == replace(FORMATS[name], name=target.name)), "")


class _Container:
    """The dtype that holds a format as an operand of a dot, by the name of its own format."""

    def __init__(self, name: str) -> None:
        self.name = format_named(name).container


@triton.constexpr_function
def layout_of(FORMAT, WIDTH, FIELD):
    """Return one integer of a format's layout; see `_Layout`."""
    return getattr(_Layout(FORMAT, WIDTH), FIELD)


@triton.constexpr_function
def container_of(FORMAT):
    """Return "bf16", "fp16", "fp32" or "fp64": what `dot` reads values of FORMAT from."""
    return _Container(FORMAT).name


COMPILED = tl.constexpr(True)
"""False in the namespace that the interpreter runs in (`launch.interpreted`)."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def widen_index(o_index):
    """Return an offset as int64: row times stride passes 2**31 on long sequences."""
    return o_index.to(tl.int64)


@triton.jit
def to_work(b, WORK: tl.constexpr):
    """Return a block in the dtype of the arithmetic between rounding points."""
    return b.to(WORK)


@triton.jit
def round_to(b, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, b_bits):
    """Round each value of an FP32 or FP64 block once to FORMAT; the dtype stays.

    `b_bits` is a uint32 block of random bits when ROUNDING is "stochastic", else unused.
    """
    WIDTH: tl.constexpr = 64 if b.dtype == tl.float64 else 32
    CAST: tl.constexpr = layout_of(FORMAT, WIDTH, "cast") if ROUNDING == "nearest_even" else ""
    if layout_of(FORMAT, WIDTH, "identity"):
        b_round = b
    elif CAST == "fp32":
        b_round = b.to(tl.float32).to(tl.float64)
    elif CAST == "fp16":
        b_round = b.to(tl.float16).to(tl.float32)
    elif CAST == "bf16" and COMPILED:
        b_round = b.to(tl.bfloat16).to(tl.float32)
    elif WIDTH == 64:
        b_int = _round_bits(b.to(tl.int64, bitcast=True), FORMAT, ROUNDING, b_bits, 64)
        b_round = tl.where(b != b, b, b_int.to(tl.float64, bitcast=True))
    else:
        b_int = _round_bits(b.to(tl.int32, bitcast=True), FORMAT, ROUNDING, b_bits, 32)
        b_round = tl.where(b != b, b, b_int.to(tl.float32, bitcast=True))
    return b_round


@triton.jit
def _round_bits(b_int, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, b_bits, WIDTH: tl.constexpr):
    """Round the bits of floating-point values, NaN aside, whose order is that of their bits."""
    STORED: tl.constexpr = layout_of(FORMAT, WIDTH, "stored")
    MANTISSA: tl.constexpr = layout_of(FORMAT, WIDTH, "mantissa")
    LARGEST: tl.constexpr = layout_of(FORMAT, WIDTH, "largest")
    b_magnitude = b_int & (2 ** (WIDTH - 1) - 1)
    b_size = b_magnitude
    if layout_of(FORMAT, WIDTH, "saturate"):
        b_size = tl.minimum(b_size, LARGEST)
    if layout_of(FORMAT, WIDTH, "narrow"):
        b_exponent = tl.maximum(b_size >> STORED, 1)
        b_below = tl.maximum(layout_of(FORMAT, WIDTH, "first_normal") - b_exponent, 0)
        b_drop = tl.maximum(b_below + (STORED - MANTISSA), 0)
        b_round = _round_significand(b_size, b_drop, FORMAT, ROUNDING, b_bits, WIDTH)
        b_round = _limit(b_round, b_size, FORMAT, ROUNDING, WIDTH)
    elif layout_of(FORMAT, WIDTH, "wide"):
        # The carrier's subnormals are normal values of FORMAT: count their leading bit.
        b_lead = (b_size.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        b_lead = tl.where(b_size >> STORED > 0, STORED, b_lead)
        b_drop = tl.maximum(b_lead - MANTISSA, 0)
        b_round = _round_significand(b_size, b_drop, FORMAT, ROUNDING, b_bits, WIDTH)
    elif MANTISSA < STORED:
        b_round = _round_last_bits(b_size, STORED - MANTISSA, ROUNDING, b_bits)
    else:
        b_round = b_size
    if layout_of(FORMAT, WIDTH, "smallest") > 0:
        b_round = tl.where(b_round < layout_of(FORMAT, WIDTH, "smallest"), 0, b_round)
    return b_round | (b_int - b_magnitude)


@triton.jit
def _round_last_bits(b_size, DROPPED: tl.constexpr, ROUNDING: tl.constexpr, b_bits):
    """Cut off the last bits of a mantissa; a carry runs into the exponent and on to infinity."""
    if ROUNDING == "nearest_even":
        b_round = b_size + (((b_size >> DROPPED) & 1) + (2 ** (DROPPED - 1) - 1))
    elif ROUNDING == "nearest_away":
        b_round = b_size + 2 ** (DROPPED - 1)
    elif ROUNDING == "away":
        b_round = b_size + (2**DROPPED - 1)
    elif ROUNDING == "stochastic":
        b_chance = (b_bits >> 8).to(b_size.dtype)
        b_chance = b_chance << max(DROPPED - 24, 0) >> max(24 - DROPPED, 0)
        b_round = b_size + ((2**DROPPED - 1) - b_chance)
    else:
        b_round = b_size
    return b_round & -(2**DROPPED)


@triton.jit
def _round_significand(
    b_size, b_drop, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, b_bits, WIDTH: tl.constexpr
):
    """Round magnitudes whose significands have `b_drop` bits that FORMAT does not hold."""
    STORED: tl.constexpr = layout_of(FORMAT, WIDTH, "stored")
    b_significand = (b_size & (2**STORED - 1)) + tl.where(b_size >> STORED > 0, 2**STORED, 0)
    # Where more than STORED + 1 bits are dropped a value is below half of FORMAT's smallest.
    b_cut = tl.minimum(b_drop, STORED + 2)
    b_unit = (b_size * 0 + 1) << b_cut
    b_rest = b_significand & (b_unit - 1)
    if ROUNDING == "nearest_even":
        m_up = 2 * b_rest + ((b_significand >> b_cut) & 1) > b_unit
    elif ROUNDING == "nearest_away":
        m_up = (2 * b_rest >= b_unit) & (b_rest > 0)
    elif ROUNDING == "away":
        m_up = b_rest > 0
    elif ROUNDING == "stochastic":
        m_up = _chance_24_bits(b_rest, b_drop, STORED) > (b_bits >> 8).to(b_size.dtype)
    else:
        m_up = b_rest < 0
    m_below = b_cut > STORED  # nearer to zero than FORMAT's smallest value
    b_down = tl.where(m_below, 0, b_size - b_rest)
    b_step = tl.where(m_below, layout_of(FORMAT, WIDTH, "quantum"), b_unit)
    return b_down + tl.where(m_up, b_step, 0)


@triton.jit
def _chance_24_bits(b_rest, b_drop, STORED: tl.constexpr):
    """Return ceil(2**24 b_rest / 2**b_drop): of 2**24 random numbers, how many round up."""
    b_left = tl.maximum(24 - b_drop, 0)
    b_right = tl.minimum(tl.maximum(b_drop - 24, 0), STORED + 2)
    return ((b_rest << b_left) + (((b_rest * 0 + 1) << b_right) - 1)) >> b_right


@triton.jit
def _limit(b_round, b_size, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, WIDTH: tl.constexpr):
    """Return rounded magnitudes, those beyond FORMAT's largest value put where it says."""
    LARGEST: tl.constexpr = layout_of(FORMAT, WIDTH, "largest")
    BEYOND: tl.constexpr = layout_of(FORMAT, WIDTH, "beyond")
    if not layout_of(FORMAT, WIDTH, "saturate"):
        if ROUNDING == "toward_zero":
            b_round = tl.minimum(b_round, LARGEST)
            b_round = tl.where(b_size == layout_of(FORMAT, WIDTH, "infinity"), BEYOND, b_round)
        else:
            b_round = tl.where(b_round > LARGEST, BEYOND, b_round)
    return b_round


@triton.jit
def random_bits(SEED, POINT, step, n, o_row, o_col):
    """Return `random_bits.bits_at(SEED, POINT, step, n, o_row, o_col)` as a block of uint32.

    The coordinates broadcast: rows `[:, None]` and columns `[None, :]`, or 0, give a tile.
    """
    b_state = _fold(_mix(_word(SEED) ^ 0x9E3779B9), POINT)
    b_state = _fold(_fold(b_state, step), n)
    return _fold(_fold(b_state, o_row), o_col)


@triton.jit
def _fold(b_state, coordinate):
    return _mix(b_state ^ _mix(_word(coordinate)))


@triton.jit
def _word(x):
    return tl.cast(x, tl.uint32)


@triton.jit
def _mix(b):
    b = b ^ (b >> 16)
    b = tl.mul(b, 0x7FEB352D, sanitize_overflow=False)
    b = b ^ (b >> 15)
    b = tl.mul(b, 0x846CA68B, sanitize_overflow=False)
    return b ^ (b >> 16)


@triton.jit
def exponential(b, EXP: tl.constexpr):
    """Return e**b of an FP32 or FP64 block by the way that `Softmax.exp` names.

    Compiled FP32: `exact` is CUDA's expf, which errs by at most 1 ULP (CUDA programming guide) and
    flushes subnormal results; `exp2` is the hardware's ex2.approx, at most 2 ULP, of a product that
    is itself rounded: near b = -20 that is 20 ULP.
    """
    if EXP == "exact":
        b_exp = libdevice.exp(b) if COMPILED else tl.exp(b)
    elif EXP == "exp2":
        b_exp = tl.exp2(b * _LOG2_E)
    else:
        b_exp = _exp2_polynomial(b * _LOG2_E)
    return b_exp


@triton.jit
def _exp2_polynomial(b):
    """Return 2**b by the cubic of FlashAttention-4; 0 below the smallest normal value."""
    WIDTH: tl.constexpr = 64 if b.dtype == tl.float64 else 32
    SMALLEST: tl.constexpr = -1022 if WIDTH == 64 else -126
    b_whole = tl.floor(b)
    b_part = b - b_whole
    b_cubic = ((0.077119090 * b_part + 0.227564394) * b_part + 0.695146143) * b_part + 1.0
    b_whole = tl.where(b_whole > SMALLEST, b_whole, SMALLEST)  # so is NaN, which has no integer
    b_whole = tl.where(b_whole < -SMALLEST, b_whole, -SMALLEST).to(tl.int32)
    if WIDTH == 64:
        b_power = ((b_whole + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        b_power = ((b_whole + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(b < SMALLEST, 0.0, b_cubic * b_power)


@triton.jit
def tanh(b):
    """Return tanh of an FP32 or FP64 block: CUDA's, or from exp and log where that is not there.

    CUDA's FP32 errs by at most 2 ULP. exp(y) - 1 is (u - 1) y / log(u) with u = exp(y) rounded:
    the errors of u - 1 and log(u) cancel (W. Kahan; N. Higham, "Accuracy and Stability of Numerical
    Algorithms", section 1.14.1).
    """
    if COMPILED:
        b_tanh = libdevice.tanh(b)
    else:
        b_twice = 2.0 * tl.abs(b)
        b_twice = tl.where(b_twice > 40.0, 40.0, b_twice)  # tanh(20) is 1 in FP64
        b_exp = tl.exp(b_twice)
        m_one = b_exp == 1.0
        b_less = (b_exp - 1.0) * (b_twice / tl.where(m_one, 1.0, tl.log(b_exp)))
        b_less = tl.where(m_one, b_twice, b_less)
        b_tanh = b_less / (b_less + 2.0)
        b_tanh = tl.where(b == 0.0, b, tl.where(b < 0.0, -b_tanh, b_tanh))
    return b_tanh


@triton.jit
def contain(b, FORMAT: tl.constexpr, WORK: tl.constexpr):
    """Return a block of values on the grid of FORMAT in the dtype that `dot` reads them from.

    `Format.container`, as operands are, if tensor cores sum its products in WORK, else WORK.
    """
    if COMPILED and tl.float32 == WORK and container_of(FORMAT) == "bf16":
        b_held = b.to(tl.bfloat16)
    elif COMPILED and tl.float32 == WORK and container_of(FORMAT) == "fp16":
        b_held = b.to(tl.float16)
    else:
        b_held = b.to(WORK)
    return b_held


@triton.jit
def dot(b_left, b_right, WORK: tl.constexpr, DOT: tl.constexpr):
    """Return the product of two operands, summed in WORK.

    16-bit pairs of one dtype go to the tensor cores, whose products are exact in FP32; all else is
    widened to WORK. There DOT says what becomes of FP32: "ieee" nothing; "tf32" rounds both to
    TF32, ties away from zero; "tf32x3" adds the products with what that dropped, smallest first.
    """
    SIXTEEN: tl.constexpr = b_left.dtype == b_right.dtype and b_left.dtype.primitive_bitwidth == 16
    if SIXTEEN and tl.float32 == WORK:
        b_product = tl.dot(b_left, b_right, input_precision="ieee")
    elif DOT == "ieee" or tl.float64 == WORK:
        b_product = tl.dot(b_left.to(WORK), b_right.to(WORK), input_precision="ieee")
    else:
        b_left = b_left.to(WORK)
        b_right = b_right.to(WORK)
        b_left_big = round_to(b_left, "tf32", "nearest_away", 0)
        b_right_big = round_to(b_right, "tf32", "nearest_away", 0)
        b_product = tl.dot(b_left_big, b_right_big, input_precision="tf32")
        if DOT == "tf32x3":
            b_left_small = round_to(b_left - b_left_big, "tf32", "nearest_away", 0)
            b_right_small = round_to(b_right - b_right_big, "tf32", "nearest_away", 0)
            b_small = tl.dot(b_left_big, b_right_small, input_precision="tf32")
            b_small = b_small + tl.dot(b_left_small, b_right_big, input_precision="tf32")
            b_product = b_small + b_product
    return b_product


@triton.jit
def divide(b_over, b_under):
    """Return the quotient, correctly rounded; `/` of FP32 is off by up to 2 ULP on a GPU."""
    return tl.div_rn(b_over, b_under) if b_over.dtype == tl.float32 else b_over / b_under
