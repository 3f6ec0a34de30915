"""Addresses past 2**31 elements: kernels write and read where a tensor says.

The interpreted kernels run on tensors whose strides go that far. Those lie in memory that is
reserved and not filled, with as much again before them: an address that has wrapped around is
within reach, and shows as a wrong value. `address_lint` looks for more of it in what is compiled.
"""

import mmap

import pytest
import torch
import triton
import triton.language as tl

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.rounding_key import draws_of
from attention_kernels.triton import launch as triton_launch
from attention_kernels.triton import runtime
from attention_kernels.triton.ahead import KERNELS, signature_of
from attention_kernels.triton.arguments import (
    Factors,
    constants_of,
    masks_of,
)
from attention_kernels.triton.backward import dbias_kernel
from attention_kernels.triton.forward import forward_kernel, merge_kernel
from tests.kernels.triton.address_lint import ttir_of, wrapping_products
from tests.kernels.triton.test_compile import FA2, FULL, MASKS

BATCHES, HEADS, ROWS, DIM = 3, 3, 4, 16
FAR = 2**30
"""The elements between two heads, or two sequences: the third lies 2**31 from the first."""
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python does not name


def far_tensor(sizes, strides):
    """A zero FP32 tensor whose first element lies amid 22 GiB of reserved pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    whole = torch.frombuffer(mmap.mmap(-1, 22 * 2**30, flags), dtype=torch.float32)
    return whole.as_strided(sizes, strides, 9 * 2**28)


def inputs(splits=1, packed=False):
    """q, k, v of BATCHES x HEADS, their constants and masks; packed, one sequence of two heads."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(BATCHES, HEADS, ROWS, DIM, generator=generator) for _ in range(3))
    numerics = PROFILES["fa2"].with_(splits=splits, block_q=16, block_k=16).resolve(q.dtype)
    mask = Mask()
    if packed:
        q, k, v = (x[:1] for x in (q, k, v))
        ends = torch.tensor([0, ROWS], dtype=torch.int32)
        mask = Mask(cu_seqlens_q=ends, cu_seqlens_k=ends)
    constants = constants_of(q, k, v, mask=mask, scale=0.25, numerics=numerics)
    masks = masks_of(mask, q, k, scale=0.25, numerics=numerics, draws=draws_of(0))
    return (q, k, v), constants, masks, mask, numerics


def run_forward(qkv, constants, masks, out, lse, query_rows=ROWS, splits=1):
    """Run `forward_kernel` on every head of every sequence."""
    q, k, v = qkv
    strides = [x.stride() for x in (q, k, v, out)]
    counts = (q.shape[0], HEADS, ROWS, query_rows, query_rows)
    factors = Factors(None, None, None)
    arguments = (q, k, v, out, lse, *strides, factors, masks, *counts)
    programs = q.shape[0] * HEADS * splits
    runtime.interpret(forward_kernel, programs, arguments, constants)


BATCHES_APART = (FAR, ROWS * DIM, DIM, 1)
HEADS_APART = (ROWS * DIM, FAR, DIM, 1)


@pytest.mark.parametrize("strides", [BATCHES_APART, HEADS_APART])
def test_the_forward_writes_out_past_2_to_the_31(strides):
    qkv, constants, masks, mask, numerics = inputs()
    out = far_tensor((BATCHES, HEADS, ROWS, DIM), strides)
    lse = torch.empty(BATCHES, HEADS, ROWS)
    run_forward(qkv, constants, masks, out, lse)
    expected, _ = triton_launch.forward(*qkv, mask=mask, scale=0.25, numerics=numerics)
    assert torch.equal(out, expected)


def test_the_forward_writes_the_lse_of_packed_rows_past_2_to_the_31():
    qkv, constants, masks, mask, numerics = inputs(packed=True)
    lse = far_tensor((1, HEADS, ROWS), (HEADS * FAR, FAR, 1))
    run_forward(qkv, constants, masks, torch.empty(1, HEADS, ROWS, DIM), lse, query_rows=FAR)
    _, expected = triton_launch.forward(*qkv, mask=mask, scale=0.25, numerics=numerics)
    assert torch.equal(lse, expected)


@pytest.mark.parametrize("strides", [BATCHES_APART, HEADS_APART])
def test_splits_are_merged_past_2_to_the_31(strides):
    """The parts of one sequence are read far apart and added far apart."""
    _, constants, masks, _, _ = inputs(splits=3)
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, HEADS, ROWS, DIM, generator=generator)
    parts = far_tensor(drawn.shape, strides).copy_(drawn)
    part_lse = torch.randn(3, HEADS, ROWS, generator=generator)
    far_out, near_out = far_tensor((1, HEADS, ROWS, DIM), strides), torch.empty(1, HEADS, ROWS, DIM)
    merged = []
    for parts_, out in ((parts, far_out), (drawn, near_out)):
        lse = torch.empty(1, HEADS, ROWS)
        arguments = (parts_, part_lse, out, lse, parts_.stride(), out.stride(), masks)
        counts = (1, HEADS, ROWS, ROWS)
        runtime.interpret(merge_kernel, HEADS, (*arguments, *counts), constants)
        merged += [out, lse]
    weights = part_lse.softmax(0)[..., None]
    assert torch.allclose(merged[0], (weights * drawn).sum(0), atol=1e-6)
    assert torch.equal(merged[0], merged[2])
    assert torch.equal(merged[1], merged[3])


def test_the_lse_of_packed_splits_is_merged_past_2_to_the_31():
    _, constants, masks, _, _ = inputs(splits=3, packed=True)
    generator = torch.Generator().manual_seed(1)
    parts = torch.randn(3, HEADS, ROWS, DIM, generator=generator)
    drawn = torch.randn(3, HEADS, ROWS, generator=generator)
    merged = []
    for rows in (ROWS, 3 * 2**27):
        part_lse, lse = (far_tensor((n, HEADS, ROWS), (HEADS * rows, rows, 1)) for n in (3, 1))
        part_lse.copy_(drawn)
        out = torch.empty(1, HEADS, ROWS, DIM)
        arguments = (parts, part_lse, out, lse, parts.stride(), out.stride(), masks)
        counts = (1, HEADS, ROWS, rows)
        runtime.interpret(merge_kernel, HEADS, (*arguments, *counts), constants)
        merged.append((out, lse))
    assert all(torch.equal(x, y) for x, y in zip(*merged, strict=True))


def ttir_of_ours(kernel, numerics, mask, dtype=torch.bfloat16):
    """The TTIR of a kernel for tensors of any strides; `compile_one` takes contiguous ones."""
    resolved = numerics.resolve(dtype)
    q = torch.empty(1, 2, 64, 64, dtype=dtype, device="meta")
    options = {"scale": 0.125, "numerics": resolved, "bias_trained": kernel is dbias_kernel}
    signature, constants, attributes = signature_of(kernel, resolved, dtype, mask)
    for name in signature:
        if name.endswith("strides"):
            signature[name] = ("i32",) * 4
    constants = {at: x for at, x in constants.items() if x != 1}
    constants[(len(kernel.params) - 1,)] = constants_of(q, q, q, mask=mask, **options)
    return ttir_of(kernel, signature, constants, attributes)


PACKED = Mask(
    causal=True,
    window=(64, None),
    alibi_slopes=torch.empty(0),
    cu_seqlens_q=torch.empty(0),
    cu_seqlens_k=torch.empty(0),
)
SCALED = PROFILES["fa3_fp8"].with_(block_q=64, block_k=64)
COMPILED = {
    "scaled splits, every mask": (SCALED.with_(splits=4), FULL),
    "reversed splits, packed": (FA2.with_(splits=4, key_order="reversed"), PACKED),
    "stochastic": (PROFILES["all_bf16"].with_(rounding="stochastic"), MASKS["causal"]),
    "key_outer, packed": (PROFILES["fa1"], PACKED),
    "bias shared": (FA2, MASKS["shared"]),
}
CASES = [
    pytest.param(case, marks=() if "splits" in case else pytest.mark.slow) for case in COMPILED
]


@pytest.mark.parametrize("case", CASES)
def test_no_product_of_32_bits_reaches_an_address_and_may_wrap_around(case):
    numerics, mask = COMPILED[case]
    for name, kernel in KERNELS.items():
        if (name != "merge_kernel" or numerics.tiling.splits > 1) and (
            name != "dbias_kernel" or mask.bias is not None
        ):
            ttir, packed = ttir_of_ours(kernel, numerics, mask), mask is PACKED
            assert wrapping_products(ttir, packed=packed) == [], name


@triton.jit
def wrapping_kernel(p, p_rows, stride, heads, query_len, WHERE: tl.constexpr):
    """Address by a product that may wrap around, where WHERE says."""
    program = tl.program_id(0)
    o_q = program % ((query_len + 63) // 64) * 64 + tl.arange(0, 64)
    if WHERE == "widened too late":
        p += (program * stride).to(tl.int64)
    elif WHERE == "tile":
        p += o_q * stride
    elif WHERE == "loaded":
        p += tl.load(p_rows + program) * stride
    elif WHERE == "loop":
        for head in range(0, heads):
            p += head * query_len
    elif WHERE == "carried":
        for _ in range(0, heads):
            program = program * 3
        p += program
    elif WHERE == "chosen":
        p += tl.where(program > heads, heads * heads, 0)
    elif WHERE == "remainder":
        p += program % query_len * 64
    else:
        p += program * stride
    tl.store(p + o_q, 0)


@triton.jit
def bounded_kernel(p, p_rows, stride, heads, query_len, WHERE: tl.constexpr):
    """Address by products that are wide or bounded."""
    program = tl.program_id(0)
    o_q = program % ((query_len + 63) // 64) * 64 + tl.arange(0, 64)
    if WHERE == "widened before":
        p += program.to(tl.int64) * stride
    elif WHERE == "within a tile":
        p += (o_q % 64) * 64 + tl.arange(0, 64)
    elif WHERE == "loaded length":
        p += (tl.load(p_rows + program + 1) - tl.load(p_rows + program)) * 2
    elif WHERE == "only a value":
        tl.store(p, program * stride)
    tl.store(p + o_q, 0)


def planted(kernel, where):
    scalars = dict.fromkeys(("stride", "heads", "query_len"), "i32")
    signature = {"p": "*i32", "p_rows": "*i32", **scalars, "WHERE": "constexpr"}
    return wrapping_products(ttir_of(kernel, signature, {(5,): where}, {}))


WRAPPING = (
    "scalar",
    "widened too late",
    "tile",
    "loaded",
    "loop",
    "carried",
    "chosen",
    "remainder",
)


@pytest.mark.parametrize("where", WRAPPING)
def test_the_lint_finds_a_planted_product(where):
    assert len(planted(wrapping_kernel, where)) == 1


@pytest.mark.parametrize(
    "where", ["widened before", "within a tile", "loaded length", "only a value"]
)
def test_the_lint_takes_a_bounded_product(where):
    assert planted(bounded_kernel, where) == []
