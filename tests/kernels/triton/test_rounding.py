"""Rounding inside kernels is `rounding.round_to`, bit for bit, and casts happen nowhere else.

On a GPU the same tests run compiled; without one the file compiles for two, in a child process.
"""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attention_kernels.formats import ROUNDINGS
from attention_kernels.random_bits import bits_at, word_at
from attention_kernels.rounding import round_to as round_tensor
from attention_kernels.triton import runtime
from attention_kernels.triton.rounding import dot, exponential, random_bits, round_to, tanh
from tests.sampling import one_in

KERNELS = Path(runtime.__file__).parent
BLOCK = {"cpu": 2**15, "cuda": 2**10}
"""Elements a program: many for the interpreter, few for a compiler, which unrolls them."""
WORD_OF_7 = tl.constexpr(word_at(7))
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
        ],
    ),
]
FORMATS = [
    *("fp64", "fp32", "tf32", "bf16", "fp16", "e4m3", "e5m2"),
    *("e3m4", "e2m1", "e6m9", "e8m15", "e9m7", "e10m40", "e11m20", "e7m30"),
    *("e2m3", "e3m2", "int8", "e4m3fnuz", "e5m2fnuz", "e4m3b11fnuz", "e2m1-ieee", "e4m3-ieee"),
    *("e5m2fnuz-flush", "e4m3fnuz-saturate", "e3m2-flush"),
    *("bf16-flush", "fp16-saturate", "e4m3-flush-saturate", "fp32-saturate", "e11m52-flush"),
    *("e9m7-saturate", "e7m30-saturate", "tf32-flush", "e5m2-saturate"),
]


@triton.jit
def _round_kernel(p_x, p_y, FORMAT: tl.constexpr, ROUNDING: tl.constexpr, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    b_bits = random_bits(WORD_OF_7, 16, 0, 3, o_x, 0) if ROUNDING == "stochastic" else 0
    tl.store(p_y + o_x, round_to(tl.load(p_x + o_x), FORMAT, ROUNDING, b_bits))


def run(kernel, grid, *arguments, device="cpu", **constants):
    launched = runtime.interpreted(kernel) if device == "cpu" else kernel
    # as the kernels are launched: a compiler that fuses operations rounds once where two do
    options = {} if device == "cpu" else {"enable_fp_fusion": False}
    with np.errstate(all="ignore"):
        launched[(grid,)](*arguments, **constants, **options)


def round_in_kernel(x, format, rounding, device):
    block = BLOCK[device]
    padded = torch.cat([x, x.new_zeros(-len(x) % block)]).to(device)
    y = torch.full_like(padded, torch.nan)
    constants = {"FORMAT": format, "ROUNDING": rounding, "BLOCK": block}
    run(_round_kernel, len(padded) // block, padded, y, device=device, **constants)
    return y.cpu()[: len(x)]


def assert_same_bits(x, y):
    assert torch.equal(x.isnan(), y.isnan())
    number = ~x.isnan()
    assert torch.equal(x[number], y[number])
    assert torch.equal(x[number].signbit(), y[number].signbit())


def fp32_patterns(tails):
    """Every sign, exponent and leading 7 bits of FP32 (each BF16), followed by each 16-bit tail."""
    head = torch.arange(2**16, dtype=torch.int64) << 16
    bits = torch.cat([head + tail for tail in tails])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def random_patterns(count, dtype):
    integer = torch.int32 if dtype == torch.float32 else torch.int64
    bounds = torch.iinfo(integer)
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(bounds.min, bounds.max, (count,), dtype=integer, generator=generator)
    return x.view(dtype)


def carried(dtype):
    """What a rounding can trip over: ties and their neighbours, subnormals, ends, odd patterns."""
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-160, 160, (2**14,), generator=generator)
    spread = torch.ldexp(torch.randn(2**14, dtype=torch.float64, generator=generator), exponent)
    near = fp32_patterns([0])[::7].double() * (1 + 2.0**-40)
    ends = [65504, 65519.99, 65520, 448, 464, 464.1, 15.5, 15.75, 3, 3.5, 3.4e38, 3.3961775e38]
    ends += [6, 7, 7.5, 7.75, 28, 30, 31, 1.984375, 1.99, 240, 247.9, 248, 57344, 61440, 0.0]
    ends += [1e300, 2.0**-150, 2.0**-151, 5e-324, 1.7e308, 2.0**63, 1.99 * 2.0**63]
    wide = torch.tensor([sign * end for end in ends for sign in (1, -1)], dtype=torch.float64)
    return torch.cat([random_patterns(2**14, dtype), *(x.to(dtype) for x in (spread, near, wide))])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("format", one_in(3, FORMATS))
def test_a_block_rounds_as_a_tensor(format, rounding, device):
    for dtype in (torch.float32, torch.float64):
        x = carried(dtype)
        bits = bits_at(7, 16, 0, 3, torch.arange(len(x)), 0)
        expected = round_tensor(x, format, rounding, bits=bits)
        assert_same_bits(round_in_kernel(x, format, rounding, device), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["bf16", "fp16", "e4m3", "e5m2", "tf32"])
def test_every_tie_of_the_hardware_formats_and_its_neighbours_round_as_torch(format, device):
    """All 65,536 BF16 values, ties of BF16, FP16 and FP8 among and between them, and beside."""
    x = fp32_patterns([0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF])
    for rounding in ("nearest_even", "nearest_away"):
        expected = round_tensor(x, format, rounding)
        assert_same_bits(round_in_kernel(x, format, rounding, device), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_every_16_bit_value_stays(rounding, device):
    patterns = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    for format, narrow in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        for dtype in (torch.float32, torch.float64):
            x = patterns.view(narrow).to(dtype)
            assert_same_bits(round_in_kernel(x, format, rounding, device), x)


def test_the_patterns_hold_values_that_two_roundings_get_wrong():
    x = carried(torch.float64)
    once, twice = round_tensor(x, "bf16"), round_tensor(round_tensor(x, "fp32"), "bf16")
    assert (once != twice).sum() > 30


@triton.jit
def _bits_kernel(p_tile, p_rows, word, step, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    o_row = 5 + tl.arange(0, ROWS)
    o_column = 900 + tl.arange(0, COLUMNS)
    b_tile = random_bits(word, 17, step, n, o_row[:, None], o_column[None, :])
    o_tile = tl.arange(0, ROWS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(p_tile + o_tile, b_tile.to(tl.int64))
    tl.store(p_rows + tl.arange(0, ROWS), random_bits(WORD_OF_7, 20, 0, n, o_row, 0).to(tl.int64))


@pytest.mark.parametrize("device", DEVICES)
def test_a_block_draws_the_bits_of_its_place(device):
    rows, columns = torch.arange(5, 13), torch.arange(900, 932)
    for seed in (0, 4_000_000_000):
        tile = torch.zeros(8, 32, dtype=torch.int64, device=device)
        by_row = torch.zeros(8, dtype=torch.int64, device=device)
        run(_bits_kernel, 1, tile, by_row, word_at(seed), 64, 3, device=device, ROWS=8, COLUMNS=32)
        assert torch.equal(tile.cpu(), bits_at(seed, 17, 64, 3, rows[:, None], columns))
        assert torch.equal(by_row.cpu(), bits_at(7, 20, 0, 3, rows, 0))


@triton.jit
def _function_kernel(p_x, p_y, FUNCTION: tl.constexpr, BLOCK: tl.constexpr):
    o_x = tl.arange(0, BLOCK)
    if FUNCTION == "tanh":
        b_y = tanh(tl.load(p_x + o_x))
    else:
        b_y = exponential(tl.load(p_x + o_x), FUNCTION)
    tl.store(p_y + o_x, b_y)


def apply(function, x, device):
    y = torch.full_like(x, torch.nan, device=device)
    run(_function_kernel, 1, x.to(device), y, device=device, FUNCTION=function, BLOCK=len(x))
    return y.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_exponentials_and_tanh_err_by_what_they_say(dtype, device):
    x = torch.linspace(-60, 8, 4096, dtype=torch.float64).to(dtype)
    small = torch.cat([torch.logspace(-30, 1.5, 2048), -torch.logspace(-30, 1.5, 2048)]).to(dtype)
    ulp = torch.finfo(dtype).eps
    product = 1 + x.abs().max().item() / 2  # exp2's argument is a product, rounded
    for function, argument, exact, allowed in (
        ("exact", x, torch.exp, 2 * ulp),
        ("exp2", x, torch.exp, (2 + product) * ulp),
        ("exp2_polynomial", x, torch.exp, 8.85e-5 + (2 + product) * ulp),
        ("tanh", small, torch.tanh, 4 * ulp),
    ):
        wanted = exact(argument.double())
        error = ((apply(function, argument, device).double() - wanted) / wanted).abs().max().item()
        assert error < allowed, function


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_cubic_is_the_written_one_bit_for_bit(dtype, device):
    smallest = -126 if dtype == torch.float32 else -1022
    x = (
        torch.linspace(1.01 * smallest, 100, 4096, dtype=torch.float64).to(dtype)
        / 1.4426950408889634
    )
    power = x * 1.4426950408889634
    part = power - power.floor()
    cubic = ((0.077119090 * part + 0.227564394) * part + 0.695146143) * part + 1.0
    expected = torch.where(power < smallest, 0.0, torch.ldexp(cubic, power.floor().int()))
    assert torch.equal(apply("exp2_polynomial", x, device), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_functions_keep_infinities_nans_and_zeros(dtype, device):
    x = torch.tensor([-torch.inf, torch.inf, torch.nan, 0.0, -0.0, -2000.0, 1.0, -1.0], dtype=dtype)
    for function in ("exact", "exp2", "exp2_polynomial"):
        y = apply(function, x, device)
        assert y[[0, 5]].tolist() == [0.0, 0.0], function
        assert y[2].isnan(), function
        assert y[[3, 4]].tolist() == [1.0, 1.0], function
    y = apply("tanh", x, device)
    assert y[[0, 1, 3, 4, 5]].tolist() == [-1.0, 1.0, 0.0, 0.0, -1.0]
    assert y[2].isnan()
    assert y.signbit()[[3, 4]].tolist() == [False, True]
    assert y[6] == -y[7]


@triton.jit
def _dot_kernel(p_left, p_right, p_y, WORK: tl.constexpr, DOT: tl.constexpr, SIZE: tl.constexpr):
    o = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(p_y + o, dot(tl.load(p_left + o), tl.load(p_right + o), WORK, DOT))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", ["ieee", "tf32", "tf32x3"])
def test_a_dot_rounds_its_fp32_operands_as_the_mode_says(mode, device):
    """One factor is a permutation, so that each sum has one term and the order can't matter."""
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    x[0] = 1 + 2**-11  # a tie: away from zero, as the hardware's conversion has it
    permutation = torch.eye(32)[torch.randperm(32, generator=torch.Generator().manual_seed(1))]
    big = round_tensor(x, "tf32", "nearest_away")
    small = round_tensor(x - big, "tf32", "nearest_away")
    kept = {"ieee": x, "tf32": big, "tf32x3": small + big}[mode]
    assert mode == "tf32" or torch.equal(kept[0], x[0])
    for left, right, expected in (
        (x, permutation, kept @ permutation),
        (permutation, x, permutation @ kept),
    ):
        y = torch.full_like(x, torch.nan, device=device)
        arguments = (left.to(device), right.to(device), y)
        run(_dot_kernel, 1, *arguments, device=device, WORK=tl.float32, DOT=mode, SIZE=32)
        assert torch.equal(y.cpu(), expected)


def test_a_dot_of_different_dtypes_is_summed_in_the_work_dtype():
    left = torch.full((16, 16), 1 + 2.0**-20)
    right = torch.full((16, 16), 1 + 2.0**-40, dtype=torch.float64)
    y = torch.zeros(16, 16, dtype=torch.float64)
    run(_dot_kernel, 1, left, right, y, WORK=tl.float64, DOT="ieee", SIZE=16)
    assert torch.equal(y, left.double() @ right)


@pytest.mark.parametrize("name", ["tiles", "forward", "backward"])
def test_no_cast_outside_the_rounding_file(name):
    source = (KERNELS / f"{name}.py").read_text()
    assert not re.findall(r"\.to\(|tl\.cast|float16|float32|bitcast", source)
