"""The flash recurrence as Triton kernels: `forward_kernel`, and the merger of its splits.

One program of `forward_kernel` attends a query block of one head over one split of the keys. It
executes the rounding points of `FlashNumerics.forward` under the dials of its softmax and tiling;
the recurrence is FlashAttention-2's (arXiv 2307.08691, algorithm 1), with `key_outer`
FlashAttention-1's update (arXiv 2205.14135, algorithm 1). `twin.forward` has it in formulas, in the
same order. `merge_kernel` adds the splits of a query block in their order, weighted by exp(lse of a
split - the largest lse).

A query block walks its keys in up to three stretches: blocks that some row sees in part on the
left, blocks that every row sees whole, and those cut on the right. The middle one, where most of
the work is, tests no mask and loads no tail (`spans.whole_span`).

Operands come rounded (`operands`). Values between rounding points are FP32 or FP64 (`N.work`).
Strides are tuples (batch, head, row, dim). Leaves out the launch (`launch`), gradients (`backward`)
and what a rounding is (`rounding`).
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attention_kernels.triton.rounding import (
    contain,
    divide,
    dot,
    exponential,
    fused,
    number,
    to_work,
    whole,
    widen_index,
)
from attention_kernels.triton.spans import hidden_span, key_span, split_span, whole_span
from attention_kernels.triton.tiles import (
    at_head,
    at_part,
    at_part_row,
    bounds,
    drop,
    finite_or_zero,
    format_at,
    head_number,
    kept,
    load_factor,
    load_rows,
    natural,
    one_for_zero,
    place,
    rounded,
    row_max,
    row_sum,
    scale_kept,
    store_rows,
    tile_scores,
    weight,
)

_LOG2_E = tl.constexpr(1.4426950408889634)
_LOG_2 = tl.constexpr(0.6931471805599453)
_MAX_SHIFT = tl.constexpr(6.0)


@triton.jit
def _block_maximum(b_scores, N: tl.constexpr):
    """Return each row's maximum, moved by beta where it is repeated; see `twin.forward`."""
    b_max = row_max(b_scores, 1)  # [BLOCK_Q]
    if N.beta > 1.0:
        b_count = row_sum(tl.where(b_scores >= (b_max - N.tolerance)[:, None], 1, 0), 1)
        b_moved = tl.where(b_max > 0.0, b_max, 0.0) * N.beta
        if N.moves_hidden:
            b_max = tl.where((b_count > 1) | (b_max == float("-inf")), b_moved, b_max)
        else:
            b_shift = b_moved - b_max
            b_doublings = tl.maximum(tl.ceil((b_shift - _MAX_SHIFT) / _LOG_2), 0.0)
            b_moved = b_max + (b_shift - b_doublings * _LOG_2)
            b_max = tl.where((b_count > 1) & (b_max > float("-inf")), b_moved, b_max)
    return b_max


@triton.jit
def _statistics(b_scores, b_max, b_sum, masks, n, o_q, o_k, step, N: tl.constexpr):
    """Return P, the rescale factor, the new maximum, and the old sum rescaled and the new."""
    b_new_max = tl.maximum(b_max, _block_maximum(b_scores, N))
    b_new_max = rounded(b_new_max, "max", N, step, n, o_q, 0)
    log2 = number(masks.scalars.log2, N.work) if N.fold else _LOG2_E
    if N.threshold > 0.0:
        m_keep = (b_new_max - b_max) * log2 <= N.threshold
        b_new_max = tl.where(m_keep, b_max, b_new_max)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN.
    b_shift = finite_or_zero(b_new_max)
    if N.fold:
        b_p = fused(b_scores, log2, (b_shift * log2)[:, None])  # [BLOCK_Q, BLOCK_K]
        b_alpha = (b_max - b_shift) * log2
    else:
        b_p = b_scores - b_shift[:, None]
        b_alpha = b_max - b_shift
    b_p = rounded(b_p, "exponents", N, 0, n, o_q[:, None], o_k[None, :])
    b_p = rounded(weight(b_p, N), "p", N, 0, n, o_q[:, None], o_k[None, :])
    b_alpha = rounded(b_alpha, "alpha_exponent", N, step, n, o_q, 0)
    b_alpha = rounded(weight(b_alpha, N), "alpha", N, step, n, o_q, 0)
    b_old_sum = rounded(b_alpha * b_sum, "rescaled_sum", N, step, n, o_q, 0)
    b_block_sum = rounded(row_sum(b_p, 1), "block_sum", N, step, n, o_q, 0)
    b_sum = rounded(b_old_sum + b_block_sum, "sum", N, step, n, o_q, 0)
    return b_p, b_alpha, b_new_max, b_old_sum, b_sum


@triton.jit
def _accumulate(
    b_acc, b_p, b_v, v_factor, b_alpha, b_old_sum, b_sum, masks, n, o_q, o_k, step, N: tl.constexpr
):
    """Return the accumulator, or with key_outer the stored output, with one block of P v."""
    o_dim = tl.arange(0, N.block_v)
    if N.p_scale > 1.0:
        b_p = b_p * N.p_scale
    FORMAT: tl.constexpr = format_at(N, "probabilities")
    b_p = rounded(b_p, "probabilities", N, 0, n, o_q[:, None], o_k[None, :])
    b_pv = dot(contain(b_p, FORMAT, N.work), b_v, N.work, N.dot)  # [BLOCK_Q, BLOCK_V]
    if N.scaled:
        b_pv = b_pv * (v_factor / N.p_scale)
    if N.key_outer:
        b_pv = scale_kept(b_pv, masks, N)
    # With key_outer acc is out already, so that l * out is what alpha * acc would be.
    b_carried = b_old_sum if N.key_outer else b_alpha
    o_row, o_col = o_q[:, None], o_dim[None, :]
    b_pv = rounded(b_pv, "block_output", N, step, n, o_row, o_col)
    b_acc = rounded(b_carried[:, None] * b_acc, "rescaled_accumulator", N, step, n, o_row, o_col)
    b_acc = rounded(b_acc + b_pv, "accumulator", N, step, n, o_row, o_col)
    if N.key_outer:
        b_acc = divide(b_acc, one_for_zero(b_sum)[:, None])
        b_acc = rounded(b_acc, "output", N, step, n, o_row, o_col)
    return b_acc


@triton.jit
def _attend_blocks(
    b_acc,
    b_max,
    b_sum,
    b_q,
    q_factor,
    p_k,
    p_v,
    k_strides,
    v_strides,
    factors,
    masks,
    o_batch,
    o_head,
    heads,
    n,
    o_q,
    query_len,
    key_len,
    first,
    stop,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Fold the key blocks of [first, stop) into accumulator, running max and running sum."""
    blocks = (key_len + N.block_k - 1) // N.block_k
    last = (stop + N.block_k - 1) // N.block_k * N.block_k - N.block_k
    for at in range(first, stop, N.block_k):
        k_start = first + last - at if N.reversed else at
        o_k = k_start + tl.arange(0, N.block_k)
        b_k = load_rows(p_k, k_strides, o_k, key_len, N, MASKED, False)
        b_v = load_rows(p_v, v_strides, o_k, key_len, N, MASKED, True)
        block = k_start // N.block_k
        kv_head = o_head // N.group
        k_factor = load_factor(factors.k, o_batch, kv_head, heads // N.group, blocks, block, N)
        v_factor = load_factor(factors.v, o_batch, kv_head, heads // N.group, blocks, block, N)
        b_scores, _ = tile_scores(
            b_q,
            b_k,
            q_factor * k_factor,
            masks,
            o_batch,
            o_head,
            o_q[:, None],
            o_k[None, :],
            query_len,
            key_len,
            n,
            N,
            MASKED,
        )
        b_p, b_alpha, b_max, b_old_sum, b_sum = _statistics(
            b_scores, b_max, b_sum, masks, n, o_q, o_k, k_start, N
        )
        # the sum is that of all weights
        b_p = drop(b_p, kept(masks, o_batch, o_head, o_q[:, None], o_k[None, :], N), N)
        b_acc = _accumulate(
            b_acc, b_p, b_v, v_factor, b_alpha, b_old_sum, b_sum, masks, n, o_q, o_k, k_start, N
        )
    return b_acc, b_max, b_sum


@triton.jit
def forward_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    factors,
    masks,
    batches,
    heads,
    max_query_len,
    query_rows,
    key_rows,
    N: tl.constexpr,
):
    """Write out and lse of block_q rows of one head, of one split of its keys.

    `batches` counts sequences; `query_rows` and `key_rows` are those of the tensors, which packed
    sequences share, `max_query_len` is the longest sequence's.
    """
    o_start, o_head, o_outer = place(max_query_len, heads, N.block_q)
    o_batch, o_split = o_outer // N.splits, o_outer % N.splits
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    n = head_number(masks, o_batch, o_head, heads, 1, N)
    o_q = o_start + tl.arange(0, N.block_q)
    p_k = at_head(p_k, k_strides, o_batch, o_head // N.group, k_first, N)
    p_v = at_head(p_v, v_strides, o_batch, o_head // N.group, k_first, N)
    p_q = at_head(p_q, q_strides, o_batch, o_head, q_first, N)
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)
    q_blocks = (query_len + N.block_q - 1) // N.block_q
    q_factor = load_factor(factors.q, o_batch, o_head, heads, q_blocks, o_start // N.block_q, N)

    b_acc = tl.full((N.block_q, N.block_v), 0.0, N.work)
    b_max = tl.full((N.block_q,), float("-inf"), N.work)
    b_sum = tl.full((N.block_q,), 0.0, N.work)
    if N.has_sinks:
        # a key of value 0 that has been seen; it counts once, in the first split
        b_sink = to_work(tl.load(masks.sinks + o_head), N.work)
        b_max = tl.where(o_split == 0, b_sink, b_max)
        b_sum = tl.where(o_split == 0, 1.0, b_sum)
    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = key_span(o_start, query_len, key_len, left, right, N)
    first, stop = hidden_span(first, stop, o_start, query_len, key_len, N)
    first, stop = split_span(first, stop, key_len, o_split, N)
    begin, end = whole_span(o_start, query_len, key_len, left, right, first, stop, N)
    if N.reversed or N.has_left:
        low = end if N.reversed else first
        high = stop if N.reversed else begin
        b_acc, b_max, b_sum = _attend_blocks(
            b_acc, b_max, b_sum, b_q, q_factor, p_k, p_v, k_strides, v_strides, factors, masks,
            o_batch, o_head, heads, n, o_q, query_len, key_len, low, high, N, True,
        )  # fmt: skip
    b_acc, b_max, b_sum = _attend_blocks(
        b_acc, b_max, b_sum, b_q, q_factor, p_k, p_v, k_strides, v_strides, factors, masks,
        o_batch, o_head, heads, n, o_q, query_len, key_len, begin, end, N, False,
    )  # fmt: skip
    if not N.reversed or N.has_left:
        low = first if N.reversed else end
        high = begin if N.reversed else stop
        b_acc, b_max, b_sum = _attend_blocks(
            b_acc, b_max, b_sum, b_q, q_factor, p_k, p_v, k_strides, v_strides, factors, masks,
            o_batch, o_head, heads, n, o_q, query_len, key_len, low, high, N, True,
        )  # fmt: skip

    # A row that attends nothing has sum 0 and max -inf: out 0, lse -inf.
    o_dim = tl.arange(0, N.block_v)
    b_lse = natural(b_max, masks, N) + rounded(tl.log(b_sum), "log_sum", N, o_split, n, o_q, 0)
    if N.splits > 1:
        b_acc = divide(b_acc, one_for_zero(b_sum)[:, None])
        b_acc = rounded(b_acc, "split_output", N, o_split, n, o_q[:, None], o_dim[None, :])
        b_lse = rounded(b_lse, "split_lse", N, o_split, n, o_q, 0)
    else:
        if not N.key_outer:
            b_acc = scale_kept(divide(b_acc, one_for_zero(b_sum)[:, None]), masks, N)
            b_acc = rounded(b_acc, "output", N, 0, n, o_q[:, None], o_dim[None, :])
        b_lse = rounded(b_lse, "lse", N, 0, n, o_q, 0)
    o_outer = o_split if N.packed else widen_index(o_split) * batches + o_batch
    p_out = at_part(p_out, out_strides, o_outer, o_head, q_first)
    store_rows(p_out, out_strides, o_q, query_len, b_acc, N, True)
    p_lse = at_part_row(p_lse, o_outer, o_head, heads, query_rows, q_first)
    tl.store(p_lse + o_q, b_lse, mask=o_q < query_len)


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
    n = head_number(masks, o_batch, o_head, heads, 1, N)
    o_q, o_dim = o_start + tl.arange(0, N.block_q), tl.arange(0, N.block_v)
    m_q = o_q < query_len
    inner = 0 if N.packed else o_batch
    outer = 1 if N.packed else batches
    b_max = tl.full((N.block_q,), float("-inf"), N.work)
    for split in range(0, N.splits):
        o_part = widen_index(split) * outer + inner
        p_split = at_part_row(p_part_lse, o_part, o_head, heads, query_rows, q_first) + o_q
        b_max = tl.maximum(b_max, tl.load(p_split, mask=m_q, other=float("-inf")))
    b_shift = finite_or_zero(b_max)
    b_acc = tl.full((N.block_q, N.block_v), 0.0, N.work)
    b_total = tl.full((N.block_q,), 0.0, N.work)
    for split in range(0, N.splits):
        o_part = widen_index(split) * outer + inner
        p_split = at_part_row(p_part_lse, o_part, o_head, heads, query_rows, q_first) + o_q
        b_lse = tl.load(p_split, mask=m_q, other=float("-inf"))
        b_weight = rounded(b_lse - b_shift, "split_exponent", N, split, n, o_q, 0)
        b_weight = rounded(exponential(b_weight, N.exp), "split_weights", N, split, n, o_q, 0)
        p_block = at_part(p_parts, part_strides, o_part, o_head, q_first)
        b_part = load_rows(p_block, part_strides, o_q, query_len, N, True, True)
        b_total += b_weight
        b_part = b_weight[:, None] * b_part
        b_acc += rounded(b_part, "split_rescaled", N, split, n, o_q[:, None], o_dim[None, :])
    b_total = rounded(b_total, "split_total", N, 0, n, o_q, 0)
    b_out = scale_kept(divide(b_acc, one_for_zero(b_total)[:, None]), masks, N)
    b_out = rounded(b_out, "output", N, 0, n, o_q[:, None], o_dim[None, :])
    p_out = at_part(p_out, out_strides, inner, o_head, q_first)
    store_rows(p_out, out_strides, o_q, query_len, b_out, N, True)
    b_log = rounded(tl.log(b_total), "split_log", N, 0, n, o_q, 0)
    b_lse = rounded(b_shift + b_log, "lse", N, 0, n, o_q, 0)
    p_lse = at_part_row(p_lse, inner, o_head, heads, query_rows, q_first)
    tl.store(p_lse + o_q, b_lse, mask=m_q)
