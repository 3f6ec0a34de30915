"""Gradients of the flash recurrence as two Triton kernels, and a third for a trained bias.

`dq_kernel` runs first, a program a query block of one query head, and leaves delta behind.
`dkv_kernel` reads it, a program a key block of one kv head. P is computed again from lse, as in
FlashAttention-2 (arXiv 2307.08691, algorithm 2), which does both in one kernel and adds dQ by
atomics. An atomic adds in the order in which programs happen to finish, and the bits of dQ would
change from run to run; two kernels compute the scores twice instead, and every sum has one order.
`dbias_kernel` computes them a third time, where the bias is trained: a program adds one tile of dS
over all the heads and batches that share it, and leaves sums over shared rows or keys to torch,
which adds those of the tiles in one order too.

They execute `FlashNumerics.backward` and those points of the forward that recur; `twin.backward`
has the formulas. Strides are tuples (batch, head, row, dim); the other arguments are those of
`forward_kernel`. Leaves out the launch (`launch`) and what a rounding is (`rounding`).
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from attention_kernels.triton.rounding import contain, dot, fused, number, to_work, whole
from attention_kernels.triton.spans import key_span, row_span
from attention_kernels.triton.tiles import (
    at_head,
    at_row,
    at_tile,
    bounds,
    drop,
    finite_or_zero,
    format_at,
    head_number,
    kept,
    load_factor,
    load_rows,
    place,
    rounded,
    row_sum,
    scale_kept,
    store_rows,
    tile_scores,
    weight,
)

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _probabilities(b_scores, b_lse, masks, n, o_q, o_k, N: tl.constexpr):
    b_shift = finite_or_zero(b_lse)
    if N.fold:
        b_p = fused(b_scores, number(masks.scalars.log2, N.work), b_shift * _LOG2_E)
    else:
        b_p = b_scores - b_shift
    b_p = rounded(b_p, "backward_exponents", N, 0, n, o_q, o_k)
    return rounded(weight(b_p, N), "backward_p", N, 0, n, o_q, o_k)


@triton.jit
def _sum_gradient(b_p, b_dp, b_delta, masks, m_kept, factor, n, o_q, o_k, N: tl.constexpr):
    """Return P (dP - delta): the gradient of the sum of capped scores and bias, unrounded."""
    if N.scaled:
        b_dp = b_dp * factor
    b_dp = scale_kept(drop(rounded(b_dp, "dp", N, 0, n, o_q, o_k), m_kept, N), masks, N)
    return rounded(b_dp - b_delta, "ds_difference", N, 0, n, o_q, o_k) * b_p


@triton.jit
def _score_gradient(
    b_p, b_dp, b_delta, b_tanh, masks, m_kept, factor, n, o_q, o_k, N: tl.constexpr
):
    """Return R_ds(P (dP - delta)), times the slope of the softcap, as an operand."""
    if N.scale_in_ds:
        b_p = b_p * number(masks.scalars.scale, N.work)
        b_p = rounded(b_p, "ds_probabilities", N, 0, n, o_q, o_k)
    b_ds = _sum_gradient(b_p, b_dp, b_delta, masks, m_kept, factor, n, o_q, o_k, N)
    if N.has_softcap:
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    FORMAT: tl.constexpr = format_at(N, "ds")
    return contain(rounded(b_ds, "ds", N, 0, n, o_q, o_k), FORMAT, N.work)


@triton.jit
def _scale_sum(b_sum, masks, N: tl.constexpr):
    """Return dQ or dK multiplied by scale, unless each dS was."""
    return b_sum if N.scale_in_ds else b_sum * number(masks.scalars.scale, N.work)


@triton.jit
def _times(b_product, factor, N: tl.constexpr):
    return b_product * factor if N.scaled else b_product


@triton.jit
def dq_kernel(
    p_q,
    p_k,
    p_v,
    p_out,
    p_dout,
    p_lse,
    p_delta,
    p_dq,
    q_strides,
    k_strides,
    v_strides,
    out_strides,
    dout_strides,
    dq_strides,
    factors,
    masks,
    heads,
    max_query_len,
    query_rows,
    key_rows,
    N: tl.constexpr,
):
    """Write dQ and delta of block_q rows of one query head."""
    o_start, o_head, o_batch = place(max_query_len, heads, N.block_q)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    n, o_kv_head = head_number(masks, o_batch, o_head, heads, 1, N), o_head // N.group
    o_q, o_dim = o_start + tl.arange(0, N.block_q), tl.arange(0, N.block_d)
    o_v_dim = tl.arange(0, N.block_v)
    m_q = o_q < query_len
    q_blocks = (query_len + N.block_q - 1) // N.block_q
    k_blocks = (key_len + N.block_k - 1) // N.block_k
    p_k = at_head(p_k, k_strides, o_batch, o_kv_head, k_first, N)
    p_v = at_head(p_v, v_strides, o_batch, o_kv_head, k_first, N)
    p_q = at_head(p_q, q_strides, o_batch, o_head, q_first, N)
    p_dout = at_head(p_dout, dout_strides, o_batch, o_head, q_first, N)
    p_out = at_head(p_out, out_strides, o_batch, o_head, q_first, N)
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)
    b_do = load_rows(p_dout, dout_strides, o_q, query_len, N, True, True)
    b_out = load_rows(p_out, out_strides, o_q, query_len, N, True, True)
    block = o_start // N.block_q
    q_factor = load_factor(factors.q, o_batch, o_head, heads, q_blocks, block, N)
    do_factor = load_factor(factors.dout, o_batch, o_head, heads, q_blocks, block, N)
    b_delta = _times(to_work(b_do, N.work), do_factor, N) * to_work(b_out, N.work)
    b_delta = rounded(b_delta, "delta_products", N, 0, n, o_q[:, None], o_v_dim[None, :])
    b_delta = rounded(row_sum(b_delta, 1), "delta", N, 0, n, o_q, 0)  # [BLOCK_Q]
    p_delta = at_row(p_delta, o_batch, o_head, heads, query_rows, q_first, N)
    tl.store(p_delta + o_q, b_delta, mask=m_q)
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_rows, q_first, N)
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=0.0)

    b_dq = tl.full((N.block_q, N.block_d), 0.0, N.work)
    first, stop = key_span(
        o_start, query_len, key_len, whole(masks.scalars.left), whole(masks.scalars.right), N
    )
    last = (stop + N.block_k - 1) // N.block_k * N.block_k - N.block_k
    for at in range(first, stop, N.block_k):
        k_start = first + last - at if N.reversed else at
        o_k = k_start + tl.arange(0, N.block_k)
        b_k = load_rows(p_k, k_strides, o_k, key_len, N, True, False)
        b_v = load_rows(p_v, v_strides, o_k, key_len, N, True, True)
        block = k_start // N.block_k
        k_factor = load_factor(factors.k, o_batch, o_kv_head, heads // N.group, k_blocks, block, N)
        v_factor = load_factor(factors.v, o_batch, o_kv_head, heads // N.group, k_blocks, block, N)
        o_row, o_col = o_q[:, None], o_k[None, :]
        b_scores, b_tanh = tile_scores(
            b_q, b_k, q_factor * k_factor, masks, o_batch, o_head, o_row, o_col,
            query_len, key_len, n, N, True,
        )  # [BLOCK_Q, BLOCK_K]  # fmt: skip
        b_p = _probabilities(b_scores, b_lse[:, None], masks, n, o_row, o_col, N)
        b_dp = dot(b_do, tl.trans(b_v), N.work, N.dot)
        m_kept = kept(masks, o_batch, o_head, o_row, o_col, N)
        b_ds = _score_gradient(
            b_p,
            b_dp,
            b_delta[:, None],
            b_tanh,
            masks,
            m_kept,
            do_factor * v_factor,
            n,
            o_row,
            o_col,
            N,
        )
        b_product = _times(dot(b_ds, b_k, N.work, N.dot), k_factor, N)
        b_dq += rounded(b_product, "dq_product", N, k_start, n, o_row, o_dim[None, :])
        b_dq = rounded(b_dq, "dq_accumulator", N, k_start, n, o_row, o_dim[None, :])

    p_dq = at_head(p_dq, dq_strides, o_batch, o_head, q_first, N)
    b_dq = rounded(_scale_sum(b_dq, masks, N), "dq", N, 0, n, o_q[:, None], o_dim[None, :])
    store_rows(p_dq, dq_strides, o_q, query_len, b_dq, N, False)


@triton.jit
def _add_query_block(
    b_dk,
    b_dv,
    b_k,
    b_v,
    k_factor,
    v_factor,
    p_q,
    p_dout,
    p_lse,
    p_delta,
    q_strides,
    dout_strides,
    factors,
    masks,
    o_batch,
    o_head,
    heads,
    q_start,
    o_k,
    query_len,
    key_len,
    N: tl.constexpr,
):
    """Return dK and dV of a key block with what one query block of one head adds to them."""
    n = head_number(masks, o_batch, o_head, heads, 1, N)
    o_dim, o_v_dim = tl.arange(0, N.block_d), tl.arange(0, N.block_v)
    o_q = q_start + tl.arange(0, N.block_q)
    m_q = o_q < query_len
    o_row, o_col = o_q[None, :], o_k[:, None]
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)
    b_do = load_rows(p_dout, dout_strides, o_q, query_len, N, True, True)
    blocks, block = (query_len + N.block_q - 1) // N.block_q, q_start // N.block_q
    q_factor = load_factor(factors.q, o_batch, o_head, heads, blocks, block, N)
    do_factor = load_factor(factors.dout, o_batch, o_head, heads, blocks, block, N)
    # lse is infinite past the last query, so that P is 0 there and adds nothing to dK and dV.
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("inf"))
    b_delta = tl.load(p_delta + o_q, mask=m_q, other=0.0)
    b_scores, b_tanh = tile_scores(
        b_k, b_q, q_factor * k_factor, masks, o_batch, o_head, o_row, o_col,
        query_len, key_len, n, N, True,
    )  # [BLOCK_K, BLOCK_Q]  # fmt: skip
    b_p = _probabilities(b_scores, b_lse[None, :], masks, n, o_row, o_col, N)
    b_dp = dot(b_v, tl.trans(b_do), N.work, N.dot)
    m_kept = kept(masks, o_batch, o_head, o_row, o_col, N)
    b_ds = _score_gradient(
        b_p, b_dp, b_delta[None, :], b_tanh, masks, m_kept, do_factor * v_factor, n, o_row, o_col, N
    )
    b_p = drop(b_p, m_kept, N)
    if N.p_scale > 1.0:
        b_p = b_p * N.p_scale
    FORMAT: tl.constexpr = format_at(N, "backward_probabilities")
    b_p = rounded(b_p, "backward_probabilities", N, 0, n, o_row, o_col)
    b_pdo = dot(contain(b_p, FORMAT, N.work), b_do, N.work, N.dot)
    b_pdo = _times(b_pdo, do_factor / N.p_scale, N)
    b_dv += rounded(b_pdo, "dv_product", N, q_start, n, o_col, o_v_dim[None, :])
    b_dv = rounded(b_dv, "dv_accumulator", N, q_start, n, o_col, o_v_dim[None, :])
    b_dsq = _times(dot(b_ds, b_q, N.work, N.dot), q_factor, N)
    b_dk += rounded(b_dsq, "dk_product", N, q_start, n, o_col, o_dim[None, :])
    b_dk = rounded(b_dk, "dk_accumulator", N, q_start, n, o_col, o_dim[None, :])
    return b_dk, b_dv


@triton.jit
def dkv_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_dk,
    p_dv,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dk_strides,
    dv_strides,
    factors,
    masks,
    heads,
    max_key_len,
    query_rows,
    key_rows,
    N: tl.constexpr,
):
    """Write dK and dV of block_k rows of one kv head; score blocks are [BLOCK_K, BLOCK_Q]."""
    kv_heads = heads // N.group
    o_start, o_kv_head, o_batch = place(max_key_len, kv_heads, N.block_k)
    q_first, query_len = bounds(masks.cu_q, o_batch, query_rows, N)
    k_first, key_len = bounds(masks.cu_k, o_batch, key_rows, N)
    o_k = o_start + tl.arange(0, N.block_k)
    o_dim, o_v_dim = tl.arange(0, N.block_d), tl.arange(0, N.block_v)
    k_blocks = (key_len + N.block_k - 1) // N.block_k
    p_k = at_head(p_k, k_strides, o_batch, o_kv_head, k_first, N)
    p_v = at_head(p_v, v_strides, o_batch, o_kv_head, k_first, N)
    b_k = load_rows(p_k, k_strides, o_k, key_len, N, True, False)
    b_v = load_rows(p_v, v_strides, o_k, key_len, N, True, True)
    block = o_start // N.block_k
    k_factor = load_factor(factors.k, o_batch, o_kv_head, kv_heads, k_blocks, block, N)
    v_factor = load_factor(factors.v, o_batch, o_kv_head, kv_heads, k_blocks, block, N)

    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = row_span(o_start, query_len, key_len, left, right, N)
    b_dk_group = tl.full((N.block_k, N.block_d), 0.0, N.work)
    b_dv_group = tl.full((N.block_k, N.block_v), 0.0, N.work)
    # The heads of a group are added by one program, in their order. A program for each would need
    # atomics, and the sum would depend on which finishes first.
    for member in range(0, N.group):
        o_head = o_kv_head * N.group + member
        p_q_head = at_head(p_q, q_strides, o_batch, o_head, q_first, N)
        p_do_head = at_head(p_dout, dout_strides, o_batch, o_head, q_first, N)
        p_lse_head = at_row(p_lse, o_batch, o_head, heads, query_rows, q_first, N)
        p_delta_head = at_row(p_delta, o_batch, o_head, heads, query_rows, q_first, N)
        b_dk = tl.full((N.block_k, N.block_d), 0.0, N.work)
        b_dv = tl.full((N.block_k, N.block_v), 0.0, N.work)
        for q_start in range(first, stop, N.block_q):
            b_dk, b_dv = _add_query_block(
                b_dk, b_dv, b_k, b_v, k_factor, v_factor, p_q_head, p_do_head, p_lse_head,
                p_delta_head, q_strides, dout_strides, factors, masks, o_batch, o_head, heads,
                q_start, o_k, query_len, key_len, N,
            )  # fmt: skip
        b_dk_group += b_dk
        b_dv_group += b_dv

    n = head_number(masks, o_batch, o_kv_head, kv_heads, N.group, N)
    o_row = o_k[:, None]
    p_dk = at_head(p_dk, dk_strides, o_batch, o_kv_head, k_first, N)
    p_dv = at_head(p_dv, dv_strides, o_batch, o_kv_head, k_first, N)
    b_dk_group = rounded(_scale_sum(b_dk_group, masks, N), "dk", N, 0, n, o_row, o_dim[None, :])
    store_rows(p_dk, dk_strides, o_k, key_len, b_dk_group, N, False)
    b_dv_group = rounded(scale_kept(b_dv_group, masks, N), "dv", N, 0, n, o_row, o_v_dim[None, :])
    store_rows(p_dv, dv_strides, o_k, key_len, b_dv_group, N, True)


@triton.jit
def _bias_tile(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    factors,
    masks,
    o_batch,
    o_head,
    heads,
    q_start,
    k_start,
    query_len,
    key_len,
    N: tl.constexpr,
):
    """Return P (dP - delta) of one tile of one head, 0 past the last query and key."""
    n = head_number(masks, o_batch, o_head, heads, 1, N)
    o_kv_head, kv_heads = o_head // N.group, heads // N.group
    o_q, o_k = q_start + tl.arange(0, N.block_q), k_start + tl.arange(0, N.block_k)
    o_row, o_col, m_q = o_q[:, None], o_k[None, :], o_q < query_len
    p_q = at_head(p_q, q_strides, o_batch, o_head, 0, N)
    p_k = at_head(p_k, k_strides, o_batch, o_kv_head, 0, N)
    p_v = at_head(p_v, v_strides, o_batch, o_kv_head, 0, N)
    p_dout = at_head(p_dout, dout_strides, o_batch, o_head, 0, N)
    b_q = load_rows(p_q, q_strides, o_q, query_len, N, True, False)
    b_k = load_rows(p_k, k_strides, o_k, key_len, N, True, False)
    b_v = load_rows(p_v, v_strides, o_k, key_len, N, True, True)
    b_do = load_rows(p_dout, dout_strides, o_q, query_len, N, True, True)
    q_blocks = (query_len + N.block_q - 1) // N.block_q
    k_blocks = (key_len + N.block_k - 1) // N.block_k
    q_block, k_block = q_start // N.block_q, k_start // N.block_k
    q_factor = load_factor(factors.q, o_batch, o_head, heads, q_blocks, q_block, N)
    do_factor = load_factor(factors.dout, o_batch, o_head, heads, q_blocks, q_block, N)
    k_factor = load_factor(factors.k, o_batch, o_kv_head, kv_heads, k_blocks, k_block, N)
    v_factor = load_factor(factors.v, o_batch, o_kv_head, kv_heads, k_blocks, k_block, N)
    # lse is infinite past the last query, so that P is 0 there and adds nothing to shared rows.
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_len, 0, N)
    p_delta = at_row(p_delta, o_batch, o_head, heads, query_len, 0, N)
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=float("inf"))
    b_delta = tl.load(p_delta + o_q, mask=m_q, other=0.0)
    b_scores, _ = tile_scores(
        b_q, b_k, q_factor * k_factor, masks, o_batch, o_head, o_row, o_col,
        query_len, key_len, n, N, True,
    )  # [BLOCK_Q, BLOCK_K]  # fmt: skip
    b_p = _probabilities(b_scores, b_lse[:, None], masks, n, o_row, o_col, N)
    b_dp = dot(b_do, tl.trans(b_v), N.work, N.dot)
    m_kept = kept(masks, o_batch, o_head, o_row, o_col, N)
    factor = do_factor * v_factor
    return _sum_gradient(b_p, b_dp, b_delta[:, None], masks, m_kept, factor, n, o_row, o_col, N)


@triton.jit
def dbias_kernel(
    p_q,
    p_k,
    p_v,
    p_dout,
    p_lse,
    p_delta,
    p_dbias,
    q_strides,
    k_strides,
    v_strides,
    dout_strides,
    dbias_strides,
    factors,
    masks,
    batches,
    heads,
    bias_batches,
    bias_heads,
    query_len,
    key_len,
    N: tl.constexpr,
):
    """Write the gradient of one tile of the bias, added over the batches and heads that share it.

    dbias is contiguous `(bias_batches, bias_heads, rows, keys)`. Where a row of the bias serves all
    queries, `rows` counts query blocks, and each gets the sum over its own; `keys` likewise.
    """
    k_blocks = (key_len + N.block_k - 1) // N.block_k
    q_blocks = (query_len + N.block_q - 1) // N.block_q
    k_block, at = tl.program_id(0) % k_blocks, tl.program_id(0) // k_blocks
    q_block, at = at % q_blocks, at // q_blocks
    bias_head, bias_batch = at % bias_heads, at // bias_heads
    q_start, k_start = q_block * N.block_q, k_block * N.block_k
    # Tiles that positions hide entirely are zeros, and no product is computed for them.
    left, right = whole(masks.scalars.left), whole(masks.scalars.right)
    first, stop = key_span(q_start, query_len, key_len, left, right, N)
    seen = (k_start < stop) & (k_start + N.block_k > first)
    b_sum = tl.full((N.block_q, N.block_k), 0.0, N.work)
    for batch in range(0, tl.where(seen, batches // bias_batches, 0)):
        for head in range(0, heads // bias_heads):
            b_sum += _bias_tile(
                p_q, p_k, p_v, p_dout, p_lse, p_delta, q_strides, k_strides, v_strides,
                dout_strides, factors, masks, bias_batch + batch, bias_head + head, heads,
                q_start, k_start, query_len, key_len, N,
            )  # fmt: skip

    o_row, o_col = q_start + tl.arange(0, N.block_q), k_start + tl.arange(0, N.block_k)
    m_row, m_col = o_row < query_len, o_col < key_len
    if N.bias_shares_rows:
        b_sum = row_sum(b_sum, 0)[None, :]
        o_row, m_row = q_block + tl.arange(0, 1), tl.arange(0, 1) == 0
    if N.bias_shares_keys:
        b_sum = row_sum(b_sum, 1)[:, None]
        o_col, m_col = k_block + tl.arange(0, 1), tl.arange(0, 1) == 0
    p_tile = at_tile(p_dbias, dbias_strides, bias_batch, bias_head, o_row[:, None], o_col[None, :])
    tl.store(p_tile, b_sum, mask=m_row[:, None] & m_col[None, :])
