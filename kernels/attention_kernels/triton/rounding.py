"""Rounding inside Triton kernels, and the arithmetic of the work format between two roundings.

`round_to` rounds a block to any format, in any rounding mode, and gives the same bits as
`rounding.round_to` gives for a tensor. The name of a format is a compile-time constant of a kernel.
While the kernel compiles, `layout_of` turns the name into the integers that the rounding needs.

All rounding is integer arithmetic on the bits of a value. Floating-point tricks, such as adding and
subtracting a large constant, would depend on whether the hardware flushes subnormals. The
exceptions are the casts that the hardware does itself as one correct rounding to nearest even: FP32
to BF16 and FP16, FP64 to FP32.

Between two rounding points a kernel computes in FP32 or FP64, and the error of that must be known.
So four operations are defined here: `exponential` and `tanh` name the library function or
instruction that they use, and its error; `dot` fixes how tensor cores treat FP32 operands; and
`divide` rounds correctly, which Triton's `/` does not.

Triton's interpreter runs on NumPy, which has no BF16. Triton represents BF16 there as 16-bit
integers: casts to it truncate, and `tl.dot` multiplies the raw integers. So in the interpreter
16-bit operands are passed as FP32 (`arguments.kernel_inputs`), rounding to BF16 works on the bits
of FP32, and `contain` does not narrow the operands of a dot. `COMPILED` is False there.

Where a kernel rounds is decided in `forward` and `backward`, and to which format in `points`.
"""

# Triton requires the annotation tl.constexpr on compile-time constants; pyright takes it for the
# type of their values.
# pyright: reportAssignmentType=false, reportArgumentType=false

import struct
from dataclasses import replace

import triton
import triton.language as tl
from triton.language.extra import libdevice

from attention_kernels.formats import FORMATS, Format, format_named

__all__ = ["container_of", "layout_of"]


# Triton 3.6 lets a `constexpr_function` call classes, but no other function of ours. So what would
# be two functions that look up a format are two classes, which look it up in `__init__`.
class _Layout:
    """A format as integers, for rounding the bits of its carrier.

    The carrier is the dtype that holds the values before and after: FP32 (`width` 32) or FP64 (64).
    """

    def __init__(self, name: str, width: int) -> None:
        target = format_named(name)
        carrier = FORMATS["fp64" if width == 64 else "fp32"]
        bias = 1 - carrier.min_exponent
        quantum = target.min_exponent - target.mantissa_bits
        self.identity = target.changes_nothing(carrier)
        self.cast = _hardware_cast(target, width)
        # The carrier: the number of its mantissa bits, and the bit pattern of its infinity.
        self.stored = carrier.mantissa_bits
        self.infinity = (2**carrier.exponent_bits - 1) << self.stored
        # The format: whether its smallest normal value is below (wide) or above (narrow) that of
        # the carrier, its number of mantissa bits, and its smallest values in the carrier's code:
        # `first_normal` is the exponent field of the smallest normal value, `quantum` the bit
        # pattern of the smallest subnormal. Magnitudes whose bits are below `smallest` are flushed.
        self.wide = target.min_exponent < carrier.min_exponent
        self.narrow = target.min_exponent > carrier.min_exponent
        self.mantissa = target.mantissa_bits
        self.first_normal = max(target.min_exponent + bias, 0)
        self.quantum = max(quantum + bias, 0) << self.stored
        self.smallest = 0 if target.subnormals else self.first_normal << self.stored
        # The bit patterns of the largest value, and of what a value beyond it becomes.
        self.largest = _bits(target.largest_in(carrier), width)
        self.saturate = target.saturate
        nan = self.infinity + (1 << (self.stored - 1))
        self.beyond = self.infinity if target.infinities else nan
        self.negative_zero = target.negative_zero


def _bits(value: float, width: int) -> int:
    """Return the bit pattern of `value` in FP32 or FP64 as a signed integer."""
    number, integer = ("<d", "<q") if width == 64 else ("<f", "<i")
    return struct.unpack(integer, struct.pack(number, value))[0]


def _hardware_cast(target: Format, width: int) -> str:
    """Return the format whose hardware cast is the rounding to `target`, nearest even; "" if none.

    `target` must equal that format in all but its name: a suffix such as -flush excludes the cast.
    """
    casts = ("fp32",) if width == 64 else ("fp16", "bf16")
    return next((name for name in casts if target == replace(FORMATS[name], name=target.name)), "")


class _Container:
    """The name of `Format.container`, the dtype that holds a format as an operand of a dot."""

    def __init__(self, name: str) -> None:
        self.name = format_named(name).container


@triton.constexpr_function
def layout_of(FORMAT, WIDTH, FIELD):
    """Return one attribute, FIELD, of the `_Layout` of a format."""
    return getattr(_Layout(FORMAT, WIDTH), FIELD)


@triton.constexpr_function
def container_of(FORMAT):
    """Return the dtype in which `dot` reads values of FORMAT: "bf16", "fp16", "fp32" or "fp64"."""
    return _Container(FORMAT).name


COMPILED = tl.constexpr(True)
"""True in compiled kernels; `launch.interpreted` sets it to False for Triton's interpreter."""

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def widen_index(o_index):
    """Return an index as int64, because row times stride exceeds 2**31 on long sequences."""
    return tl.cast(o_index, tl.int64)


@triton.jit
def whole(halves):
    """Return the 32-bit integer of two numbers, its halves of 16 bits (`arguments.Scalars`)."""
    return (tl.cast(halves[0], tl.int32) << 16) | tl.cast(halves[1], tl.int32)


@triton.jit
def number(x, WORK: tl.constexpr):
    """Return a number of `arguments.Scalars` in WORK: an FP32 one, or FP64's bits in four parts."""
    if tl.float64 == WORK:
        b_high = (tl.cast(x[0], tl.int64) << 48) | (tl.cast(x[1], tl.int64) << 32)
        b_low = (tl.cast(x[2], tl.int64) << 16) | tl.cast(x[3], tl.int64)
        x_work = (b_high | b_low).to(tl.float64, bitcast=True)
    else:
        x_work = x
    return x_work


@triton.jit
def to_work(b, WORK: tl.constexpr):
    """Cast a block to WORK, the dtype in which a kernel computes between rounding points."""
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
    """Round floating-point values given as their bit patterns; the caller handles NaN.

    Without the sign, bit patterns are ordered as the values are, so they can be compared, and a
    carry out of the mantissa gives the next binade. `b_size` is the magnitude that is rounded.
    """
    STORED: tl.constexpr = layout_of(FORMAT, WIDTH, "stored")
    MANTISSA: tl.constexpr = layout_of(FORMAT, WIDTH, "mantissa")
    LARGEST: tl.constexpr = layout_of(FORMAT, WIDTH, "largest")
    b_magnitude = b_int & (2 ** (WIDTH - 1) - 1)
    b_size = b_magnitude
    if layout_of(FORMAT, WIDTH, "saturate"):
        b_size = tl.minimum(b_size, LARGEST)
    if layout_of(FORMAT, WIDTH, "narrow"):
        # A subnormal of the carrier has exponent field 0 but the spacing of exponent field 1. Below
        # FORMAT's first normal value one more bit is dropped for each binade.
        b_exponent = tl.maximum(b_size >> STORED, 1)
        b_below = tl.maximum(layout_of(FORMAT, WIDTH, "first_normal") - b_exponent, 0)
        b_drop = tl.maximum(b_below + (STORED - MANTISSA), 0)
        b_round = _round_significand(b_size, b_drop, FORMAT, ROUNDING, b_bits, WIDTH)
        b_round = _limit(b_round, b_size, FORMAT, ROUNDING, WIDTH)
    elif layout_of(FORMAT, WIDTH, "wide"):
        # The carrier's subnormals are normal values of FORMAT, so the bits to drop count from their
        # leading bit. As integers they are below 2**23 and exact in FP32, whose exponent is then
        # the position of that bit. The carrier is FP32, since FP64 has the most exponent bits.
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
    b_sign = b_int - b_magnitude
    if not layout_of(FORMAT, WIDTH, "negative_zero"):
        b_sign = tl.where(b_round == 0, 0, b_sign)
    return b_round | b_sign


@triton.jit
def _round_last_bits(b_size, DROPPED: tl.constexpr, ROUNDING: tl.constexpr, b_bits):
    """Round away the last DROPPED bits of a mantissa; a carry may lead to the carrier's infinity.

    Each mode adds an integer that carries where it rounds up, as `rounding.round_last_bits` does.
    """
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
    """Round magnitudes, from each of whose significands the last `b_drop` bits are dropped.

    Unlike in `_round_last_bits`, the number of dropped bits differs from value to value.
    """
    STORED: tl.constexpr = layout_of(FORMAT, WIDTH, "stored")
    b_significand = (b_size & (2**STORED - 1)) + tl.where(b_size >> STORED > 0, 2**STORED, 0)
    # A significand has STORED + 1 bits. If more are dropped, the value is below half of FORMAT's
    # smallest, and how far below changes nothing; the bound keeps the shift within the integer.
    b_cut = tl.minimum(b_drop, STORED + 2)
    b_unit = (b_size * 0 + 1) << b_cut
    b_rest = b_significand & (b_unit - 1)
    if ROUNDING == "nearest_even":
        # The last kept bit breaks a tie: it is 1 if the value below is odd.
        m_up = 2 * b_rest + ((b_significand >> b_cut) & 1) > b_unit
    elif ROUNDING == "nearest_away":
        m_up = (2 * b_rest >= b_unit) & (b_rest > 0)
    elif ROUNDING == "away":
        m_up = b_rest > 0
    elif ROUNDING == "stochastic":
        m_up = _chance_24_bits(b_rest, b_drop, STORED) > (b_bits >> 8).to(b_size.dtype)
    else:
        m_up = b_rest < 0  # never: toward zero
    m_below = b_cut > STORED  # smaller than FORMAT's smallest value: its neighbours are 0 and that
    b_down = tl.where(m_below, 0, b_size - b_rest)
    b_step = tl.where(m_below, layout_of(FORMAT, WIDTH, "quantum"), b_unit)
    return b_down + tl.where(m_up, b_step, 0)


@triton.jit
def _chance_24_bits(b_rest, b_drop, STORED: tl.constexpr):
    """Return ceil(2**24 * b_rest / 2**b_drop): how many of the 2**24 random numbers round up."""
    b_left = tl.maximum(24 - b_drop, 0)
    b_right = tl.minimum(tl.maximum(b_drop - 24, 0), STORED + 2)
    return ((b_rest << b_left) + (((b_rest * 0 + 1) << b_right) - 1)) >> b_right


@triton.jit
def _limit(b_round, b_size, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, WIDTH: tl.constexpr):
    """Handle overflow: replace rounded magnitudes that are beyond FORMAT's largest value.

    `b_size` holds the magnitudes before the rounding: toward zero, only infinity overflows. A
    format that saturates needs nothing here, because `_round_bits` has clamped the magnitudes.
    """
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
def random_bits(word, POINT, step, n, o_row, o_col):
    """Return `random_bits.bits_after(word, POINT, step, n, o_row, o_col)` as a block of uint32.

    `word` is what a call draws by, POINT the stream of a rounding point. The coordinates
    broadcast: `o_row` `[:, None]` and `o_col` `[None, :]`, either of which may be 0, give the bits
    of a tile.
    """
    b_state = fold(fold(fold(word, POINT), step), n)
    return fold(fold(b_state, o_row), o_col)


@triton.jit
def fold(b_state, coordinate):
    """Return a hash with one coordinate more, uint32; both may be blocks."""
    return _mix(to_word(b_state) ^ _mix(to_word(coordinate)))


@triton.jit
def to_word(x):
    """Return integers as uint32 words, of the same bits."""
    return tl.cast(x, tl.uint32)


@triton.jit
def _mix(b):
    """Hash uint32 values with "lowbias32"; its products are meant to wrap around modulo 2**32."""
    b = b ^ (b >> 16)
    b = tl.mul(b, 0x7FEB352D, sanitize_overflow=False)
    b = b ^ (b >> 15)
    b = tl.mul(b, 0x846CA68B, sanitize_overflow=False)
    return b ^ (b >> 16)


@triton.jit
def exponential(b, EXP: tl.constexpr):
    """Return e**b of an FP32 or FP64 block by the method EXP, one of those of `Softmax.exp`.

    In compiled FP32, `exact` is CUDA's expf, which errs by at most 1 ULP (CUDA programming guide)
    and flushes subnormal results. `exp2` is the hardware's ex2.approx, which errs by at most 2 ULP,
    of the product b * log2(e). That product is rounded too, which adds up to 16 ULP near b = -20.
    """
    if EXP == "exact":
        b_exp = libdevice.exp(b) if COMPILED else tl.exp(b)
    else:
        b_exp = power_of_two(b * _LOG2_E, EXP)
    return b_exp


@triton.jit
def power_of_two(b, EXP: tl.constexpr):
    """Return 2**b of an FP32 or FP64 block, by the hardware's instruction or the cubic."""
    return tl.exp2(b) if EXP == "exp2" else _exp2_polynomial(b)


@triton.jit
def fused(b_left, b_right, b_subtracted):
    """Return fma(left, right, -subtracted), rounded once; in the interpreter as in the twin.

    That has no fused operation either (`twin.arithmetic.exponents` says how far its way is off).
    """
    if COMPILED:
        b = tl.fma(b_left, b_right, -b_subtracted)
    else:
        b_wide = b_left.to(tl.float64) * b_right.to(tl.float64) - b_subtracted.to(tl.float64)
        b = b_wide.to(b_left.dtype)
    return b


@triton.jit
def _exp2_polynomial(b):
    """Return 2**b by FlashAttention-4's cubic polynomial for the fraction of b.

    The relative error is at most 8.8e-5. Results below the smallest normal value are 0.
    """
    WIDTH: tl.constexpr = 64 if b.dtype == tl.float64 else 32
    SMALLEST: tl.constexpr = -1022 if WIDTH == 64 else -126
    b_whole = tl.floor(b)
    b_part = b - b_whole
    b_cubic = ((0.077119090 * b_part + 0.227564394) * b_part + 0.695146143) * b_part + 1.0
    # Both bounds are written with `where`, so that NaN, which no integer stands for, becomes
    # SMALLEST; the result is NaN all the same, because b_cubic is.
    b_whole = tl.where(b_whole > SMALLEST, b_whole, SMALLEST)
    b_whole = tl.where(b_whole < -SMALLEST, b_whole, -SMALLEST).to(tl.int32)
    if WIDTH == 64:
        b_power = ((b_whole + 1023).to(tl.int64) << 52).to(tl.float64, bitcast=True)
    else:
        b_power = ((b_whole + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(b < SMALLEST, 0.0, b_cubic * b_power)


@triton.jit
def tanh(b):
    """Return tanh of an FP32 or FP64 block.

    Compiled, this is CUDA's function, which in FP32 errs by at most 2 ULP. The interpreter lacks
    it; there tanh(x) = e / (e + 2) with e = exp(y) - 1 and y = 2 |x|, and the sign of x. To keep
    small e accurate, it is computed as (u - 1) y / log(u) with u = exp(y) rounded: the errors of
    u - 1 and log(u) cancel (W. Kahan; N. Higham, "Accuracy and Stability of Numerical Algorithms",
    section 1.14.1).
    """
    if COMPILED:
        b_tanh = libdevice.tanh(b)
    else:
        b_twice = 2.0 * tl.abs(b)
        b_twice = tl.where(b_twice > 40.0, 40.0, b_twice)  # tanh(20) rounds to 1 in FP64
        b_exp = tl.exp(b_twice)
        m_one = b_exp == 1.0  # y is tiny: log(u) would be 0, and exp(y) - 1 is y
        b_less = (b_exp - 1.0) * (b_twice / tl.where(m_one, 1.0, tl.log(b_exp)))
        b_less = tl.where(m_one, b_twice, b_less)
        b_tanh = b_less / (b_less + 2.0)
        b_tanh = tl.where(b == 0.0, b, tl.where(b < 0.0, -b_tanh, b_tanh))
    return b_tanh


@triton.jit
def contain(b, FORMAT: tl.constexpr, WORK: tl.constexpr):
    """Cast a block of values, rounded to FORMAT before, to the dtype in which `dot` reads them.

    That is BF16 or FP16 if it is `Format.container` of FORMAT and WORK is FP32, because tensor
    cores sum products of 16-bit operands in FP32. In every other case, and in the interpreter, it
    is WORK. The cast is exact.
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
    """Return the matrix product of two operands, summed in WORK.

    If WORK is FP32, two operands of the same 16-bit dtype go to the tensor cores, whose products
    are exact in FP32. All other operands are widened to WORK. DOT says how FP32 operands are then
    multiplied: "ieee" in FP32; "tf32" after rounding both to TF32, ties away from zero; "tf32x3"
    also adds the products with the remainders of that rounding, the smallest terms first.
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
    """Return the correctly rounded quotient; Triton's `/` of FP32 errs by up to 2 ULP on a GPU."""
    return tl.div_rn(b_over, b_under) if b_over.dtype == tl.float32 else b_over / b_under
