"""Rounding inside kernels is `formats.round_to`, bit for bit, and casts happen nowhere else."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from attention_kernels import round_to as round_tensor
from attention_kernels import triton_launch
from attention_kernels.triton_rounding import round_to

KERNELS = Path(triton_launch.__file__).parent
BLOCK = 8192
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


@triton.jit
def _round_kernel(p_x, p_y, FORMAT: tl.constexpr, BLOCK: tl.constexpr):
    o_x = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(p_y + o_x, round_to(tl.load(p_x + o_x), FORMAT))


def round_in_kernel(x, format, device):
    x = torch.cat([x, x.new_zeros(-len(x) % BLOCK)]).to(device)
    y = torch.full_like(x, torch.nan)
    kernel = triton_interpret.interpreted(_round_kernel) if device == "cpu" else _round_kernel
    with np.errstate(all="ignore"):
        kernel[(len(x) // BLOCK,)](x, y, FORMAT=format, BLOCK=BLOCK)
    return y.cpu()


def assert_same_bits(x, y):
    assert torch.equal(x.isnan(), y.isnan())
    number = ~x.isnan()
    assert torch.equal(x[number], y[number])
    assert torch.equal(x[number].signbit(), y[number].signbit())


def fp32_patterns():
    """Every sign, exponent and leading 7 bits of FP32, with tails on and beside each tie."""
    head = torch.arange(2**16, dtype=torch.int64) << 16
    tails = [0, 1, 0x0FFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF]
    bits = torch.cat([head + tail for tail in tails])
    return torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)


def fp64_patterns():
    """The FP32 patterns, moved by what only FP64 can see, and values outside FP32's range."""
    x = fp32_patterns().double()
    wide = torch.tensor([1e300, -1e300, 1e-300, 3.5e38, 2.0**-150, 2.0**-151, 5e-324, -0.0])
    return torch.cat([x, x * (1 + 2.0**-40), x * (1 - 2.0**-40), wide.double()])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp64"])
def test_fp32_rounds_in_the_kernel_as_in_torch(format, device):
    x = fp32_patterns()
    assert_same_bits(round_in_kernel(x, format, device)[: len(x)], round_tensor(x, format))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("format", ["bf16", "fp16", "fp32", "fp64"])
def test_fp64_is_rounded_once_in_the_kernel(format, device):
    x = fp64_patterns()
    assert_same_bits(round_in_kernel(x, format, device)[: len(x)], round_tensor(x, format))


def test_fp64_patterns_hold_values_that_two_roundings_get_wrong():
    x = fp64_patterns()
    once, twice = round_tensor(x, "bf16"), round_tensor(round_tensor(x, "fp32"), "bf16")
    assert (once != twice).sum() > 1000


@pytest.mark.parametrize("name", ["triton_tiles", "triton_forward", "triton_backward"])
def test_no_cast_outside_the_rounding_file(name):
    source = (KERNELS / f"{name}.py").read_text()
    assert not re.findall(r"\.to\(|tl\.cast|float16|float32|bitcast", source)
