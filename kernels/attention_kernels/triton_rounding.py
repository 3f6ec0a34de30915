"""Rounding inside Triton kernels: every cast happens here, to a format named by a constexpr.

A rounding point rounds a block once, to nearest with ties to even, and keeps the dtype that
carries it, as `formats.round_to` does for tensors. The name of the constexpr at the call is the
name of the rounding point, a field of `FlashNumerics` in upper case. Leaves out other rounding
modes and formats narrower than 16 bits.

Two ways to the same bits. Compiled, FP32 to BF16 is the hardware's cast. Interpreted, that cast
truncates and BF16 is an integer type to NumPy, so the sum is rounded on its bits and stays FP32.
FP64 goes to 16 bits through FP32 rounded to odd, which keeps the second rounding from seeing a tie
that the first one made (S. Boldo, G. Melquiond, "Emulation of FMA and correctly rounded sums:
proved algorithms using rounding to odd", 2008): 53 bits to 24 to 8 is then one rounding.
"""

import triton
import triton.language as tl

COMPILED = tl.constexpr(True)
"""False in the namespace that the interpreter runs in (`triton_launch.interpreted`)."""


@triton.jit
def widen_index(o_index):
    """Return an offset as int64: row times stride passes 2**31 on long sequences."""
    return o_index.to(tl.int64)


@triton.jit
def to_work(b, WORK: tl.constexpr):
    """Return a block in the dtype of the arithmetic between rounding points."""
    return b.to(WORK)


@triton.jit
def _odd_fp32(b):
    """Return an FP64 block as FP32, inexact values on the neighbour whose last bit is one."""
    b_near = b.to(tl.float32)
    b_bits = b_near.to(tl.int32, bitcast=True)
    b_back = b_near.to(tl.float64)
    # Sign and magnitude: one less is nearer to zero, one more is farther, for either sign.
    b_step = tl.where(tl.abs(b_back) > tl.abs(b), -1, 1)
    m_move = (b_back != b) & ((b_bits & 1) == 0)
    return tl.where(m_move, b_bits + b_step, b_bits).to(tl.float32, bitcast=True)


@triton.jit
def _nearest_bf16_bits(b):
    """Return an FP32 block on the BF16 grid, rounded on its bits."""
    b_bits = b.to(tl.uint32, bitcast=True)
    b_even = b_bits + 0x7FFF + ((b_bits >> 16) & 1)
    b_round = (b_even & 0xFFFF0000).to(tl.float32, bitcast=True)
    # The carry of a NaN with a full payload would run into the sign.
    return tl.where(b != b, b, b_round)


@triton.jit
def _nearest_16_bits(b, FORMAT: tl.constexpr):
    """Return an FP32 block on the grid of a 16-bit format, still FP32."""
    if FORMAT == "fp16":
        b_near = b.to(tl.float16).to(tl.float32)
    elif COMPILED:
        b_near = b.to(tl.bfloat16).to(tl.float32)
    else:
        b_near = _nearest_bf16_bits(b)
    return b_near


@triton.jit
def round_to(b, FORMAT: tl.constexpr):
    """Round each value of an FP32 or FP64 block once to FORMAT; the dtype stays."""
    if FORMAT == "fp64":
        b_near = b
    elif FORMAT == "fp32":
        b_near = b.to(tl.float32).to(b.dtype)
    elif b.dtype == tl.float64:
        b_near = _nearest_16_bits(_odd_fp32(b), FORMAT).to(tl.float64)
    else:
        b_near = _nearest_16_bits(b, FORMAT)
    return b_near


@triton.jit
def _round_any(b, FORMAT: tl.constexpr):
    return round_to(b if b.dtype == tl.float64 else b.to(tl.float32), FORMAT)


@triton.jit
def operand(b, FORMAT: tl.constexpr, WORK: tl.constexpr):
    """Round a block of any dtype once to FORMAT, as an operand of `dot`.

    Where tensor cores read FORMAT and sum in WORK the block is held in FORMAT, else in WORK: the
    values are the same. An FP64 block is rounded before it is narrowed.
    """
    if COMPILED and tl.float32 == WORK and FORMAT == "bf16":
        b_operand = b if b.dtype == tl.bfloat16 else _round_any(b, FORMAT).to(tl.bfloat16)
    elif COMPILED and tl.float32 == WORK and FORMAT == "fp16":
        b_operand = b if b.dtype == tl.float16 else _round_any(b, FORMAT).to(tl.float16)
    else:
        b_operand = _round_any(b, FORMAT).to(WORK)
    return b_operand


@triton.jit
def dot(b_left, b_right, WORK: tl.constexpr):
    """Return the product of two operands, summed in WORK; 16-bit pairs go to the tensor cores."""
    if b_left.dtype == b_right.dtype:
        b_product = tl.dot(b_left, b_right, input_precision="ieee")
    else:
        b_product = tl.dot(b_left.to(WORK), b_right.to(WORK), input_precision="ieee")
    return b_product


@triton.jit
def divide(b_over, b_under):
    """Return the quotient, correctly rounded; `/` of FP32 is off by up to 2 ULP on a GPU."""
    return tl.div_rn(b_over, b_under) if b_over.dtype == tl.float32 else b_over / b_under
