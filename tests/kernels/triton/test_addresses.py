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
from triton.runtime.interpreter import interpreter_builder

from attention_kernels import PROFILES
from attention_kernels.masks import Mask
from attention_kernels.rounding_key import draws_of
from attention_kernels.triton import fast, runtime
from attention_kernels.triton import launch as triton_launch
from attention_kernels.triton.ahead import KERNELS, signature_of
from attention_kernels.triton.arguments import (
    Factors,
    constants_of,
    masks_of,
    places_of,
)
from attention_kernels.triton.backward import dbias_kernel
from attention_kernels.triton.fast_launch import fast_constants, key_of
from attention_kernels.triton.forward import forward_kernel, merge_kernel
from tests.kernels.triton.address_lint import ttir_of, wrapping_results
from tests.kernels.triton.fast_launches import launches_of, signature_of_launch
from tests.kernels.triton.test_compile import FA2, FULL, MASKS

BATCHES, HEADS, ROWS, DIM = 3, 3, 4, 16
FAR = 2**30
"""The elements between two heads, or two sequences: the third lies 2**31 from the first."""
_NO_RESERVE = 0x4000  # MAP_NORESERVE of Linux, which Python does not name


def far_tensor(sizes, strides, before=9, after=13):
    """A zero FP32 tensor whose first element lies amid so many GiB of reserved pages."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    reserved = mmap.mmap(-1, (before + after) * 2**30, flags)
    whole = torch.frombuffer(reserved, dtype=torch.float32)
    return whole.as_strided(sizes, strides, before * 2**28)


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


@pytest.mark.parametrize("keys", [2**24 - 1, 2**24 - 7, 2**24 - 8])
def test_a_group_is_added_up_to_the_last_of_almost_2_to_the_31_values(keys, monkeypatch):
    """Of these, dK has 2**31 - 128, 2**31 - 896 and 2**31 - 1024 values in a head."""
    size, block, tail = keys * 128, 1024, slice(-128, None)
    q = torch.empty(1, 2, 4, 128, dtype=torch.bfloat16)
    numerics = PROFILES["fa2"].resolve(q.dtype)
    constants = fast_constants(key_of(q, q[:, :1], q[:, :1], Mask(), numerics), adds_dk=False)
    assert constants.block_values == block
    places = places_of(Mask(), q, q, scale=0.25, numerics=numerics)
    parts, total = far_tensor((2, size), (size, 1), 17, 17), far_tensor((1, size), (size, 1))
    parts[:, tail] = torch.arange(256.0).view(2, 128)
    last = -(-size // block) - 1

    def start_the_last(x, y, z):
        interpreter_builder.grid_idx = (last, y, z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", start_the_last)
    runtime.interpret(fast.fast_group_kernel, 1, (parts, total, places, size), constants)
    assert torch.equal(total[0, tail], 128 + 2 * torch.arange(128.0))


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
def test_no_product_or_sum_of_32_bits_reaches_an_address_and_may_wrap_around(case):
    numerics, mask = COMPILED[case]
    for name, kernel in KERNELS.items():
        if (name != "merge_kernel" or numerics.tiling.splits > 1) and (
            name != "dbias_kernel" or mask.bias is not None
        ):
            ttir, packed = ttir_of_ours(kernel, numerics, mask), mask is PACKED
            found = wrapping_results(ttir, packed=packed)
            assert [x for x in found if not is_of_a_shared_bias(name, x)] == [], name


def is_of_a_shared_bias(name, line):
    """Whether it counts batches or heads that share a bias: below the number of all, an int32."""
    return name == "dbias_kernel" and line.endswith((", %head : i32", ", %batch : i32"))


WINDOW = (64, 32)
FAST = {
    "descriptors": (90, 2, 64, WINDOW, False),
    "descriptors, dK apart": (90, 1, 256, (None, None), False),
    "pointers": (80, 1, 40, WINDOW, False),
    "pointers, dK apart": (80, 2, 256, (None, None), False),
    "packed": (90, 1, 64, (None, None), True),
    "packed, in groups": (100, 4, 128, WINDOW, True),
}
"""Architecture, query heads of a kv head, head_dim, window, and whether sequences are packed."""
FAST_CASES = [
    pytest.param(case, marks=pytest.mark.slow if FAST[case][3] != WINDOW else ()) for case in FAST
]


def fast_launches(arch, group, head_dim, window, packed):
    """What the fast path launches for a call."""
    q = torch.empty(1 if packed else 2, 2 * group, 300, head_dim, dtype=torch.bfloat16)
    starts = torch.tensor([0, 170, 300], dtype=torch.int32) if packed else None
    mask = Mask(window=window, cu_seqlens_q=starts, cu_seqlens_k=starts)
    return launches_of(arch, q, q[:, :2], q[:, :2], mask)


@pytest.mark.parametrize("case", FAST_CASES)
def test_no_product_or_sum_of_the_fast_path_reaches_an_address_and_may_wrap_around(case):
    for launch in fast_launches(*FAST[case]):
        ttir, name = ttir_of(launch.kernel, *signature_of_launch(launch), {}), launch.kernel
        assert ("tt.descriptor_load" in ttir) == launch.constants.descriptors, name
        assert wrapping_results(ttir, packed=launch.constants.packed) == [], name


def test_every_kernel_of_the_fast_path_is_looked_at():
    read = {
        (launch.kernel.__name__, launch.constants.descriptors)
        for param in FAST_CASES
        if not param.marks
        for launch in fast_launches(*FAST[param.values[0]])
    }
    kernels = {name for name in vars(fast) if name.startswith("fast_")}
    assert kernels == {name for name, _ in read} != set()
    assert kernels - {"fast_group_kernel"} == {name for name, described in read if described}


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
def other_wrapping_kernel(p, p_rows, stride, heads, query_len, WHERE: tl.constexpr):
    """Address by a sum, or by what is wide again before the last product, where WHERE says."""
    program = tl.program_id(0)
    if WHERE == "sum":
        p += program // ((heads + 63) // 64)
    elif WHERE == "difference":
        p += tl.load(p_rows) - heads
    else:
        p += (program * stride).to(tl.int64) * query_len
    tl.store(p, 0)


@triton.jit
def bounded_kernel(p, p_rows, stride, heads, query_len, WHERE: tl.constexpr):
    """Address by products and sums that are wide or bounded."""
    program = tl.program_id(0)
    o_q = program % ((query_len + 63) // 64) * 64 + tl.arange(0, 64)
    if WHERE == "widened before":
        p += program.to(tl.int64) * stride
    elif WHERE == "within a tile":
        p += (o_q % 64) * 64 + tl.arange(0, 64)
    elif WHERE == "sum of places":
        p += (o_q + query_len) // 2 - query_len
    elif WHERE == "loaded length":
        p += (tl.load(p_rows + program + 1) - tl.load(p_rows + program)) * 2
    elif WHERE == "only a value":
        tl.store(p, program * stride)
    tl.store(p + o_q, 0)


def planted(kernel, where):
    scalars = dict.fromkeys(("stride", "heads", "query_len"), "i32")
    signature = {"p": "*i32", "p_rows": "*i32", **scalars, "WHERE": "constexpr"}
    return wrapping_results(ttir_of(kernel, signature, {(5,): where}, {}))


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
def test_the_lint_finds_what_is_planted(where):
    assert len(planted(wrapping_kernel, where)) == 1


@pytest.mark.parametrize("where", ["sum", "difference", "widened, then multiplied"])
def test_the_lint_finds_sums_and_what_is_widened_too_late(where):
    assert len(planted(other_wrapping_kernel, where)) == 1


@pytest.mark.parametrize(
    "where",
    ["widened before", "within a tile", "sum of places", "loaded length", "only a value"],
)
def test_the_lint_takes_what_is_bounded(where):
    assert planted(bounded_kernel, where) == []
