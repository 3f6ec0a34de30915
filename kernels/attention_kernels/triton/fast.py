"""The fast path: `fa2` of BF16 or FP16 operands, and nothing that can be dialled.

The kernels do what those of `forward` and `backward` do at those numerics, in the same order, and
give the same bits at the same tile: the tests compare them in the interpreter. What is different is
how they are laid out:

- Blocks that a mask cuts are walked apart from those that every row sees whole, backward too, and
  only the first kind is masked.
- Results are stored in the dtype of the operands, each rounded once where it is stored.
- Every kernel has a tile of its own, and may read by tensor descriptors (TMA; `fast_launch.TILES`).
- dK and dV of each query head are a program's, as in FlashAttention-2, and a last kernel adds the
  heads of a group in their order. So one kv head still makes a program for each query head.

Arguments are those of the kernels they stand beside; `N` is a `fast_launch.FastConstants`. Leaves
out which calls may come here, and the launch (`fast_launch`).
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attention_kernels.triton.rounding import (
    contain,
    divide,
    dot,
    fused,
    number,
    to_work,
    whole,
    widen_index,
)
from attention_kernels.triton.spans import (
    key_span,
    row_span,
    whole_row_span,
    whole_span,
)
from attention_kernels.triton.tiles import (
    at_head,
    at_row,
    bounds,
    finite_or_zero,
    format_at,
    load_rows,
    natural,
    one_for_zero,
    place,
    rounded,
    row_max,
    row_sum,
    store_rows,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _operand(b, POINT: tl.constexpr, N: tl.constexpr):
    """Return an operand of a product, rounded to its format and held in that."""
    FORMAT: tl.constexpr = format_at(N, POINT)
    return contain(rounded(b, POINT, N, 0, (0, 0), 0, 0), FORMAT, N.work)


@triton.jit
def _head(source, strides, o_batch, o_head, o_first, N: tl.constexpr):
    """Return the pointer to a head's first row; a descriptor is of the whole tensor."""
    return source if N.descriptors else at_head(source, strides, o_batch, o_head, o_first, N)


@triton.jit
def _tile(
    source, strides, at, start, rows, BLOCK: tl.constexpr, N: tl.constexpr, TAIL: tl.constexpr,
    OF_V: tl.constexpr,
):  # fmt: skip
    """Load rows from `start` on of a head: `at` is its batch and its number among its kind.

    A descriptor gives zeros past the last row, and past head_dim, in either case.
    """
    if N.descriptors:
        WIDTH: tl.constexpr = N.block_v if OF_V else N.block_d
        b = source.load([at[0], at[1], start, 0]).reshape(BLOCK, WIDTH)
    else:
        b = load_rows(source, strides, start + tl.arange(0, BLOCK), rows, N, TAIL, OF_V)
    return b


@triton.jit
def _place_queries(length, heads, N: tl.constexpr):
    """Return first row, head and batch of this program; rows with most keys to see come first."""
    o_start, o_head, o_batch = place(length, heads, N.block_q)
    if N.has_right:
        blocks = (length + N.block_q - 1) // N.block_q
        o_start = (blocks - 1) * N.block_q - o_start
    return o_start, o_head, o_batch


@triton.jit
def _hide(b_scores, masks, o_q, o_k, query_len, key_len, N: tl.constexpr):
    """Return the scores with -inf where a query may not attend a key."""
    m_visible = (o_k < key_len) & _in_window(masks, o_q, o_k, key_len - query_len, N)
    return tl.where(m_visible, b_scores, float("-inf"))


@triton.jit
def _in_window(masks, o_q, o_k, offset, N: tl.constexpr):
    """Return where the window lets a query see a key, be that one of the sequence or not."""
    m_visible = True
    if N.has_right:
        m_visible = o_k <= o_q + (offset + whole(masks.scalars.right))
    if N.has_left:
        m_visible = m_visible & (o_k >= o_q + (offset - whole(masks.scalars.left)))
    return m_visible


@triton.jit
def _attend(
    b_acc, b_max, b_sum, b_q, p_k, p_v, k_strides, v_strides, at, masks, o_q, query_len, key_len,
    first, stop, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Fold the key blocks of [first, stop) into accumulator, running max and running sum."""
    log2 = number(masks.scalars.log2, N.work)
    for k_start in range(first, stop, N.block_k):
        o_k = k_start + tl.arange(0, N.block_k)
        b_k = _tile(p_k, k_strides, at, k_start, key_len, N.block_k, N, MASKED, False)
        b_v = _tile(p_v, v_strides, at, k_start, key_len, N.block_k, N, MASKED, True)
        b_scores = dot(b_q, tl.trans(b_k), N.work, N.dot)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            b_scores = _hide(b_scores, masks, o_q[:, None], o_k[None, :], query_len, key_len, N)
        b_new_max = tl.maximum(b_max, row_max(b_scores, 1))
        b_shift = finite_or_zero(b_new_max)
        b_p = tl.exp2(fused(b_scores, log2, (b_shift * log2)[:, None]))
        b_alpha = tl.exp2((b_max - b_shift) * log2)
        b_sum = b_alpha * b_sum + row_sum(b_p, 1)
        b_pv = dot(_operand(b_p, "probabilities", N), b_v, N.work, N.dot)
        b_acc = b_alpha[:, None] * b_acc + b_pv
        b_max = b_new_max
    return b_acc, b_max, b_sum


@triton.jit
def fast_forward_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_lse,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    masks,
    heads,
    max_query_len,
    query_rows,
    key_rows,
    N: tl.constexpr,
):
    """Write out and lse of block_q rows of one head."""
    o_start, o_head, o_batch = _place_queries(max_query_len, heads, N)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    o_q = o_start + tl.arange(0, N.block_q)
    at = (o_batch, o_head // N.group)
    p_k = _head(p_k, k_strides, o_batch, o_head // N.group, k_first, N)
    p_v = _head(p_v, v_strides, o_batch, o_head // N.group, k_first, N)
    p_q = at_head(p_q, q_strides, o_batch, o_head, q_first, N)
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)

    b_acc = tl.full((N.block_q, N.block_v), 0.0, N.work)
    b_max = tl.full((N.block_q,), float("-inf"), N.work)
    b_sum = tl.full((N.block_q,), 0.0, N.work)
    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = key_span(o_start, query_len, key_len, left, right, N)
    begin, end = whole_span(o_start, query_len, key_len, left, right, first, stop, N)
    if N.has_left:
        b_acc, b_max, b_sum = _attend(
            b_acc, b_max, b_sum, b_q, p_k, p_v, k_strides, v_strides, at, masks, o_q,
            query_len, key_len, first, begin, N, True,
        )  # fmt: skip
    b_acc, b_max, b_sum = _attend(
        b_acc, b_max, b_sum, b_q, p_k, p_v, k_strides, v_strides, at, masks, o_q,
        query_len, key_len, begin, end, N, False,
    )  # fmt: skip
    b_acc, b_max, b_sum = _attend(
        b_acc, b_max, b_sum, b_q, p_k, p_v, k_strides, v_strides, at, masks, o_q,
        query_len, key_len, end, stop, N, True,
    )  # fmt: skip

    # A row that attends nothing has sum 0 and max -inf: out 0, lse -inf.
    b_lse = natural(b_max, masks, N) + tl.log(b_sum)
    b_acc = divide(b_acc, one_for_zero(b_sum)[:, None])
    b_acc = _operand(b_acc, "output", N)
    p_out = at_head(p_out, out_strides, o_batch, o_head, q_first, N)
    store_rows(p_out, out_strides, o_q, query_len, b_acc, N, True)
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_rows, q_first, N)
    tl.store(p_lse + o_q, b_lse, mask=o_q < query_len)


@triton.jit
def _probabilities(b_scores, b_shift, masks, N: tl.constexpr):
    """Return P of scores and of what their exponents of 2 are less by, the LSE times log2(e)."""
    return tl.exp2(fused(b_scores, number(masks.scalars.log2, N.work), b_shift))


@triton.jit
def _add_keys(
    b_dq, b_q, b_do, b_shift, b_delta, p_k, p_v, k_strides, v_strides, at, masks, o_q,
    query_len, key_len, first, stop, N: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dQ of a query block with what the key blocks of [first, stop) add to it."""
    for k_start in range(first, stop, N.block_k):
        o_k = k_start + tl.arange(0, N.block_k)
        b_k = _tile(p_k, k_strides, at, k_start, key_len, N.block_k, N, MASKED, False)
        b_v = _tile(p_v, v_strides, at, k_start, key_len, N.block_k, N, MASKED, True)
        b_scores = dot(b_q, tl.trans(b_k), N.work, N.dot)  # [BLOCK_Q, BLOCK_K]
        if MASKED:
            b_scores = _hide(b_scores, masks, o_q[:, None], o_k[None, :], query_len, key_len, N)
        b_p = _probabilities(b_scores, b_shift[:, None], masks, N)
        b_dp = dot(b_do, tl.trans(b_v), N.work, N.dot)
        b_ds = _operand((b_dp - b_delta[:, None]) * b_p, "ds", N)
        b_dq += dot(b_ds, b_k, N.work, N.dot)
    return b_dq


@triton.jit
def fast_dq_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_dout,
    p_lse,
    p_shift,
    p_delta,
    p_dq,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dq_strides,
    masks,
    heads,
    max_query_len,
    query_rows,
    key_rows,
    row_rows,
    N: tl.constexpr,
):
    """Write dQ of block_q rows of one query head, and what `fast_dkv_kernel` reads of each row.

    That is delta, and the shift of its exponents, in `row_rows` rows, past the last query 0 and
    infinity.
    """
    o_start, o_head, o_batch = _place_queries(max_query_len, heads, N)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    o_q = o_start + tl.arange(0, N.block_q)
    m_q = o_q < query_len
    at = (o_batch, o_head // N.group)
    p_k = _head(p_k, k_strides, o_batch, o_head // N.group, k_first, N)
    p_v = _head(p_v, v_strides, o_batch, o_head // N.group, k_first, N)
    p_q = at_head(p_q, q_strides, o_batch, o_head, q_first, N)
    p_dout = at_head(p_dout, dout_strides, o_batch, o_head, q_first, N)
    p_out = at_head(p_out, out_strides, o_batch, o_head, q_first, N)
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)
    b_do = load_rows(p_dout, dout_strides, o_q, query_len, N, True, True)
    b_out = load_rows(p_out, out_strides, o_q, query_len, N, True, True)
    b_delta = row_sum(to_work(b_do, N.work) * to_work(b_out, N.work), 1)
    p_delta = at_row(p_delta, o_batch, o_head, heads, row_rows, q_first, N)
    m_row = m_q if N.packed else o_q < row_rows
    tl.store(p_delta + o_q, b_delta, mask=m_row)
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_rows, q_first, N)
    b_shift = finite_or_zero(tl.load(p_lse + o_q, mask=m_q, other=float("inf"))) * _LOG2_E
    p_shift = at_row(p_shift, o_batch, o_head, heads, row_rows, q_first, N)
    tl.store(p_shift + o_q, b_shift, mask=m_row)

    b_dq = tl.full((N.block_q, N.block_d), 0.0, N.work)
    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = key_span(o_start, query_len, key_len, left, right, N)
    begin, end = whole_span(o_start, query_len, key_len, left, right, first, stop, N)
    if N.has_left:
        b_dq = _add_keys(
            b_dq, b_q, b_do, b_shift, b_delta, p_k, p_v, k_strides, v_strides, at, masks, o_q,
            query_len, key_len, first, begin, N, True,
        )  # fmt: skip
    b_dq = _add_keys(
        b_dq, b_q, b_do, b_shift, b_delta, p_k, p_v, k_strides, v_strides, at, masks, o_q,
        query_len, key_len, begin, end, N, False,
    )  # fmt: skip
    b_dq = _add_keys(
        b_dq, b_q, b_do, b_shift, b_delta, p_k, p_v, k_strides, v_strides, at, masks, o_q,
        query_len, key_len, end, stop, N, True,
    )  # fmt: skip
    p_dq = at_head(p_dq, dq_strides, o_batch, o_head, q_first, N)
    b_dq = _operand(b_dq * number(masks.scalars.scale, N.work), "dq", N)
    store_rows(p_dq, dq_strides, o_q, query_len, b_dq, N, False)


@triton.jit
def _add_queries(
    b_dk, b_dv, b_k, b_v, p_q, p_dout, p_shift, p_delta, q_strides, dout_strides, at, masks, o_k,
    query_len, key_len, first, stop, N: tl.constexpr, TAIL: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Return dK and dV of a key block with what the query blocks of [first, stop) add to them.

    Keys past the end need no mask: what they get is not stored. Queries past the end have an
    infinite shift, so that their P is 0.
    """
    for q_start in range(first, stop, N.block_q):
        o_q = q_start + tl.arange(0, N.block_q)
        b_q = _tile(p_q, q_strides, at, q_start, query_len, N.block_q, N, TAIL, False)
        b_do = _tile(p_dout, dout_strides, at, q_start, query_len, N.block_q, N, TAIL, True)
        b_shift = _load_row(p_shift, o_q, query_len, float("inf"), N)
        b_scores = dot(b_k, tl.trans(b_q), N.work, N.dot)  # [BLOCK_K, BLOCK_Q]
        if MASKED:
            m_seen = _in_window(masks, o_q[None, :], o_k[:, None], key_len - query_len, N)
            b_scores = tl.where(m_seen, b_scores, float("-inf"))
        b_p = _probabilities(b_scores, b_shift[None, :], masks, N)
        if N.makes_dk:
            b_delta = _load_row(p_delta, o_q, query_len, 0.0, N)
            b_dp = dot(b_v, tl.trans(b_do), N.work, N.dot)
            b_ds = _operand((b_dp - b_delta[None, :]) * b_p, "ds", N)
        if N.makes_dv:
            b_dv += dot(_operand(b_p, "backward_probabilities", N), b_do, N.work, N.dot)
        if N.makes_dk:
            b_dk += dot(b_ds, b_q, N.work, N.dot)
    return b_dk, b_dv


@triton.jit
def _load_row(p_row, o_q, query_len, PAST: tl.constexpr, N: tl.constexpr):
    """Load a number of each query; past the last it is there, unless sequences are packed."""
    if N.packed:
        b_row = tl.load(p_row + o_q, mask=o_q < query_len, other=PAST)
    else:
        b_row = tl.load(p_row + o_q)
    return b_row


@triton.jit
def fast_dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_shift,
    p_delta,
    p_dk,
    p_dv,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    masks,
    heads,
    max_key_len,
    query_rows,
    key_rows,
    row_rows,
    N: tl.constexpr,
):
    """Write what one query head adds to dK and dV, or one of them, of block_k rows of its kv head.

    Where each query head has a kv head that is all of it, and is rounded here; else it is neither
    scaled nor rounded, and `fast_group_kernel` adds the heads of a group.
    """
    o_start, o_head, o_batch = place(max_key_len, heads, N.block_k)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    o_k = o_start + tl.arange(0, N.block_k)
    at = (o_batch, o_head)
    p_q = _head(p_q, q_strides, o_batch, o_head, q_first, N)
    p_dout = _head(p_dout, dout_strides, o_batch, o_head, q_first, N)
    p_shift = at_row(p_shift, o_batch, o_head, heads, row_rows, q_first, N)
    p_delta = at_row(p_delta, o_batch, o_head, heads, row_rows, q_first, N)
    p_k = at_head(p_k, k_strides, o_batch, o_head // N.group, k_first, N)
    p_v = at_head(p_v, v_strides, o_batch, o_head // N.group, k_first, N)
    b_k = load_rows(p_k, k_strides, o_k, key_len, N, True, False)
    b_v = load_rows(p_v, v_strides, o_k, key_len, N, True, True)

    b_dk = tl.full((N.block_k, N.block_d), 0.0, N.work)
    b_dv = tl.full((N.block_k, N.block_v), 0.0, N.work)
    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = row_span(o_start, query_len, key_len, left, right, N)
    begin, end = whole_row_span(o_start, query_len, key_len, left, right, first, stop, N)
    if N.has_right:
        b_dk, b_dv = _add_queries(
            b_dk, b_dv, b_k, b_v, p_q, p_dout, p_shift, p_delta, q_strides, dout_strides, at,
            masks, o_k, query_len, key_len, first, begin, N, True, True,
        )  # fmt: skip
    # A descriptor gives zeros past the last query, so that blocks are alike to the end.
    LAST: tl.constexpr = N.descriptors and not N.has_left
    b_dk, b_dv = _add_queries(
        b_dk, b_dv, b_k, b_v, p_q, p_dout, p_shift, p_delta, q_strides, dout_strides, at,
        masks, o_k, query_len, key_len, begin, stop if LAST else end, N, False, False,
    )  # fmt: skip
    if not LAST:
        b_dk, b_dv = _add_queries(
            b_dk, b_dv, b_k, b_v, p_q, p_dout, p_shift, p_delta, q_strides, dout_strides, at,
            masks, o_k, query_len, key_len, end, stop, N, True, N.has_left,
        )  # fmt: skip

    if N.makes_dk:
        p_dk = at_head(p_dk, dk_strides, o_batch, o_head, k_first, N)
        if N.group == 1:
            b_dk = _operand(b_dk * number(masks.scalars.scale, N.work), "dk", N)
        store_rows(p_dk, dk_strides, o_k, key_len, b_dk, N, False)
    if N.makes_dv:
        p_dv = at_head(p_dv, dv_strides, o_batch, o_head, k_first, N)
        if N.group == 1:
            b_dv = _operand(b_dv, "dv", N)
        store_rows(p_dv, dv_strides, o_k, key_len, b_dv, N, True)


@triton.jit
def fast_group_kernel(p_parts, p_sum, masks, size, N: tl.constexpr):
    """Write dK or dV of some values of one kv head: the sum over its query heads, in their order.

    `p_parts` is contiguous `(batch x kv heads, group, size)`, `p_sum` `(batch x kv heads, size)`.
    """
    # not (size + block_values - 1): near 2**31 that is negative
    blocks = (size - 1) // N.block_values + 1
    o_value = tl.program_id(0) % blocks * N.block_values + tl.arange(0, N.block_values)
    m_value = o_value < size
    kv_head = widen_index(tl.program_id(0) // blocks)
    b_sum = tl.full((N.block_values,), 0.0, N.work)
    for member in range(0, N.group):
        p_part = p_parts + (kv_head * N.group + member) * size
        b_sum += tl.load(p_part + o_value, mask=m_value, other=0.0)
    if N.adds_dk:
        b_sum = b_sum * number(masks.scalars.scale, N.work)
    tl.store(p_sum + kv_head * size + o_value, _operand(b_sum, "dk", N), mask=m_value)
