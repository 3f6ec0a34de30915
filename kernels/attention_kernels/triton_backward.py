"""Gradients of the flash recurrence as two Triton kernels; no atomics, so sums have one order.

`dq_kernel` runs first, a program a query block of one query head, and leaves delta behind;
`dkv_kernel` reads it, a program a key block of one kv head. P is recomputed from lse as in
FlashAttention-2 (arXiv 2307.08691, algorithm 2), which does both in one kernel and adds dQ by
atomics. Executes `FlashNumerics.backward` and the forward's points that recur. Leaves out the
launch (`triton_launch`) and what a rounding is (`triton_rounding`). Strides are tuples
(batch, head, row, dim).
"""

import triton
import triton.language as tl

from attention_kernels.triton_rounding import dot, operand, round_to, to_work
from attention_kernels.triton_tiles import (
    at_head,
    at_row,
    batch_and_head,
    finite_or_zero,
    first_row,
    key_stops,
    load_rows,
    mask_scores,
    row_sum,
    scores,
    store_rows,
)


@triton.jit
def _probabilities(b_scores, b_lse, STATISTICS: tl.constexpr):
    return round_to(tl.exp(b_scores - finite_or_zero(b_lse)), STATISTICS)


@triton.jit
def _score_gradient(b_p, b_dp, b_delta, DP: tl.constexpr, DS: tl.constexpr, WORK: tl.constexpr):
    return operand(b_p * (round_to(b_dp, DP) - b_delta), DS, WORK)


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
    heads,
    query_len,
    key_len,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORK: tl.constexpr,
    OPERANDS: tl.constexpr,
    SCORES: tl.constexpr,
    STATISTICS: tl.constexpr,
    DELTA: tl.constexpr,
    DP: tl.constexpr,
    DS: tl.constexpr,
    DQ_ACCUMULATOR: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    """Write dQ and delta of BLOCK_Q rows of one query head."""
    o_start = first_row(query_len, BLOCK_Q)
    o_batch, o_head = batch_and_head(query_len, heads, BLOCK_Q)
    o_q = o_start + tl.arange(0, BLOCK_Q)
    m_q = o_q < query_len
    p_k = at_head(p_k, k_strides, o_batch, o_head // GROUP)
    p_v = at_head(p_v, v_strides, o_batch, o_head // GROUP)
    p_q = at_head(p_q, q_strides, o_batch, o_head)
    p_dout = at_head(p_dout, dout_strides, o_batch, o_head)
    p_out = at_head(p_out, out_strides, o_batch, o_head)
    b_q = load_rows(p_q, q_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
    b_q = operand(b_q, OPERANDS, WORK)
    b_do = load_rows(p_dout, dout_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
    b_do = operand(b_do, OPERANDS, WORK)
    b_out = load_rows(p_out, out_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
    b_delta = round_to(row_sum(to_work(b_do, WORK) * b_out, 1), DELTA)  # [BLOCK_Q]
    p_delta = at_row(p_delta, o_batch, o_head, heads, query_len)
    tl.store(p_delta + o_q, b_delta, mask=m_q)
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_len)
    b_lse = tl.load(p_lse + o_q, mask=m_q, other=0.0)

    b_dq = tl.full((BLOCK_Q, BLOCK_D), 0.0, WORK)
    _, stop = key_stops(o_start, query_len, key_len, CAUSAL, BLOCK_Q, BLOCK_K)
    for k_start in range(0, stop, BLOCK_K):
        o_k = k_start + tl.arange(0, BLOCK_K)
        b_k = load_rows(p_k, k_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
        b_v = load_rows(p_v, v_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
        b_k = operand(b_k, OPERANDS, WORK)
        b_v = operand(b_v, OPERANDS, WORK)
        b_s = scores(b_q, b_k, SCALE, SCORES, WORK)  # [BLOCK_Q, BLOCK_K]
        b_s = mask_scores(b_s, o_q[:, None], o_k[None, :], query_len, key_len, CAUSAL)
        b_p = _probabilities(b_s, b_lse[:, None], STATISTICS)
        b_dp = dot(b_do, tl.trans(b_v), WORK)
        b_ds = _score_gradient(b_p, b_dp, b_delta[:, None], DP, DS, WORK)
        b_dq = round_to(b_dq + dot(b_ds, b_k, WORK), DQ_ACCUMULATOR)

    p_dq = at_head(p_dq, dq_strides, o_batch, o_head)
    store_rows(p_dq, dq_strides, o_q, query_len, round_to(b_dq * SCALE, GRADIENTS), HEAD_DIM)


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
    dkv_strides,
    heads,
    query_len,
    key_len,
    SCALE: tl.constexpr,
    CAUSAL: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WORK: tl.constexpr,
    OPERANDS: tl.constexpr,
    SCORES: tl.constexpr,
    STATISTICS: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    DP: tl.constexpr,
    DS: tl.constexpr,
    DKV_ACCUMULATOR: tl.constexpr,
    GRADIENTS: tl.constexpr,
):
    """Write dK and dV of BLOCK_K rows of one kv head; score blocks are [BLOCK_K, BLOCK_Q]."""
    o_start = first_row(key_len, BLOCK_K)
    o_batch, o_kv_head = batch_and_head(key_len, heads // GROUP, BLOCK_K)
    o_k = o_start + tl.arange(0, BLOCK_K)
    p_k = at_head(p_k, k_strides, o_batch, o_kv_head)
    p_v = at_head(p_v, v_strides, o_batch, o_kv_head)
    b_k = load_rows(p_k, k_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
    b_k = operand(b_k, OPERANDS, WORK)
    b_v = load_rows(p_v, v_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
    b_v = operand(b_v, OPERANDS, WORK)

    first = 0
    if CAUSAL:
        first = tl.maximum(o_start - (key_len - query_len), 0) // BLOCK_Q * BLOCK_Q
    b_dk_group = tl.full((BLOCK_K, BLOCK_D), 0.0, WORK)
    b_dv_group = tl.full((BLOCK_K, BLOCK_D), 0.0, WORK)
    for member in range(0, GROUP):
        o_head = o_kv_head * GROUP + member
        p_q_head = at_head(p_q, q_strides, o_batch, o_head)
        p_do_head = at_head(p_dout, dout_strides, o_batch, o_head)
        p_lse_head = at_row(p_lse, o_batch, o_head, heads, query_len)
        p_delta_head = at_row(p_delta, o_batch, o_head, heads, query_len)
        b_dk = tl.full((BLOCK_K, BLOCK_D), 0.0, WORK)
        b_dv = tl.full((BLOCK_K, BLOCK_D), 0.0, WORK)
        for q_start in range(first, query_len, BLOCK_Q):
            o_q = q_start + tl.arange(0, BLOCK_Q)
            m_q = o_q < query_len
            b_q = load_rows(p_q_head, q_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
            b_q = operand(b_q, OPERANDS, WORK)
            b_do = load_rows(p_do_head, dout_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
            b_do = operand(b_do, OPERANDS, WORK)
            b_lse = tl.load(p_lse_head + o_q, mask=m_q, other=float("inf"))
            b_delta = tl.load(p_delta_head + o_q, mask=m_q, other=0.0)
            b_s = scores(b_k, b_q, SCALE, SCORES, WORK)  # [BLOCK_K, BLOCK_Q]
            b_s = mask_scores(b_s, o_q[None, :], o_k[:, None], query_len, key_len, CAUSAL)
            b_p = _probabilities(b_s, b_lse[None, :], STATISTICS)
            b_dv_block = dot(operand(b_p, PROBABILITIES, WORK), b_do, WORK)
            b_dv = round_to(b_dv + b_dv_block, DKV_ACCUMULATOR)
            b_dp = dot(b_v, tl.trans(b_do), WORK)
            b_ds = _score_gradient(b_p, b_dp, b_delta[None, :], DP, DS, WORK)
            b_dk = round_to(b_dk + dot(b_ds, b_q, WORK), DKV_ACCUMULATOR)
        b_dk_group += b_dk
        b_dv_group += b_dv

    p_dk = at_head(p_dk, dkv_strides, o_batch, o_kv_head)
    p_dv = at_head(p_dv, dkv_strides, o_batch, o_kv_head)
    b_dk_group = round_to(b_dk_group * SCALE, GRADIENTS)
    store_rows(p_dk, dkv_strides, o_k, key_len, b_dk_group, HEAD_DIM)
    store_rows(p_dv, dkv_strides, o_k, key_len, round_to(b_dv_group, GRADIENTS), HEAD_DIM)
