"""The merger of splits as a Triton kernel: weights exp(lse of a split - the largest lse).

One program a query block of one head; splits are added in their order. Leaves out what a split is
(`triton_forward`). Strides are tuples (split and batch, head, row, dim).
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attention_kernels.triton.rounding import divide, exponential
from attention_kernels.triton.tiles import (
    bounds,
    finite_or_zero,
    load_rows,
    one_for_zero,
    place,
    rounded,
    store_rows,
)


@triton.jit
def merge_kernel(
    p_parts,
    p_part_lse,
    p_out,
    p_lse,
    part_strides,
    out_strides,
    masks,
    batches,
    heads,
    max_query_len,
    query_rows,
    N: tl.constexpr,
):
    """Write out and lse of block_q rows of one head from those of its splits."""
    o_start, o_head, o_batch = place(max_query_len, heads, N.block_q)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    n = o_batch * heads + o_head
    o_q, o_dim = o_start + tl.arange(0, N.block_q), tl.arange(0, N.block_d)
    m_q = o_q < query_len
    inner = 0 if N.packed else o_batch
    outer = 1 if N.packed else batches
    p_row = p_part_lse + (inner * heads + o_head) * query_rows + q_first
    p_part = p_parts + inner * part_strides[0] + o_head * part_strides[1]
    p_part = p_part + q_first * part_strides[2]
    b_max = tl.full((N.block_q,), float("-inf"), N.work)
    for split in range(0, N.splits):
        p_split = p_row + split * outer * heads * query_rows + o_q
        b_max = tl.maximum(b_max, tl.load(p_split, mask=m_q, other=float("-inf")))
    b_shift = finite_or_zero(b_max)
    b_acc = tl.full((N.block_q, N.block_d), 0.0, N.work)
    b_total = tl.full((N.block_q,), 0.0, N.work)
    for split in range(0, N.splits):
        p_split = p_row + split * outer * heads * query_rows + o_q
        b_lse = tl.load(p_split, mask=m_q, other=float("-inf"))
        b_weight = exponential(b_lse - b_shift, N.exp)
        b_weight = rounded(b_weight, N.statistics, N, 25, split, n, o_q, 0)
        p_block = p_part + split * outer * part_strides[0]
        b_part = load_rows(p_block, part_strides, o_q, query_len, N, True)
        b_total += b_weight
        b_acc += b_weight[:, None] * b_part
    b_total = rounded(b_total, N.statistics, N, 26, 0, n, o_q, 0)
    b_out = divide(b_acc, one_for_zero(b_total)[:, None])
    b_out = rounded(b_out, N.output, N, 23, 0, n, o_q[:, None], o_dim[None, :])
    p_out = p_out + inner * out_strides[0] + o_head * out_strides[1] + q_first * out_strides[2]
    store_rows(p_out, out_strides, o_q, query_len, b_out, N)
    b_lse = rounded(b_shift + tl.log(b_total), N.lse, N, 24, 0, n, o_q, 0)
    p_lse = p_lse + (inner * heads + o_head) * query_rows + q_first
    tl.store(p_lse + o_q, b_lse, mask=m_q)
