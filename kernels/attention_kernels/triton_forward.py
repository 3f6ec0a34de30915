"""The flash recurrence as a Triton kernel: one program a query block of one head.

Executes the rounding points of `FlashNumerics.forward`; the recurrence is FlashAttention-2's
(arXiv 2307.08691, algorithm 1), key blocks in increasing order. Leaves out the launch
(`triton_launch`), gradients (`triton_backward`) and what a rounding is (`triton_rounding`).
Values between rounding points are FP32 or FP64 (WORK). Strides are tuples (batch, head, row, dim).
"""

import triton
import triton.language as tl

from attention_kernels.triton_rounding import divide, dot, operand, round_to
from attention_kernels.triton_tiles import (
    at_head,
    at_row,
    batch_and_head,
    finite_or_zero,
    first_row,
    key_stops,
    load_rows,
    mask_scores,
    row_max,
    row_sum,
    scores,
    store_rows,
)


@triton.jit
def _update(
    b_scores,
    b_v,
    b_acc,
    b_max,
    b_sum,
    WORK: tl.constexpr,
    STATISTICS: tl.constexpr,
    PROBABILITIES: tl.constexpr,
    ACCUMULATOR: tl.constexpr,
):
    """Fold one block of scores into accumulator, running max and running sum."""
    b_new_max = round_to(tl.maximum(b_max, row_max(b_scores, 1)), STATISTICS)  # [BLOCK_Q]
    b_shift = finite_or_zero(b_new_max)
    b_p = round_to(tl.exp(b_scores - b_shift[:, None]), STATISTICS)  # [BLOCK_Q, BLOCK_K]
    b_alpha = round_to(tl.exp(b_max - b_shift), STATISTICS)
    b_sum = round_to(b_alpha * b_sum + row_sum(b_p, 1), STATISTICS)
    b_pv = dot(operand(b_p, PROBABILITIES, WORK), b_v, WORK)  # [BLOCK_Q, BLOCK_D]
    b_acc = round_to(b_alpha[:, None] * b_acc + b_pv, ACCUMULATOR)
    return b_acc, b_new_max, b_sum


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
    ACCUMULATOR: tl.constexpr,
    OUTPUT: tl.constexpr,
    LSE: tl.constexpr,
):
    """Write out and lse of BLOCK_Q rows of one head; GROUP query heads share a kv head."""
    o_start = first_row(query_len, BLOCK_Q)
    o_batch, o_head = batch_and_head(query_len, heads, BLOCK_Q)
    o_q = o_start + tl.arange(0, BLOCK_Q)
    p_k = at_head(p_k, k_strides, o_batch, o_head // GROUP)
    p_v = at_head(p_v, v_strides, o_batch, o_head // GROUP)
    p_q = at_head(p_q, q_strides, o_batch, o_head)
    b_q = load_rows(p_q, q_strides, o_q, query_len, HEAD_DIM, BLOCK_D, True)
    b_q = operand(b_q, OPERANDS, WORK)

    b_acc = tl.full((BLOCK_Q, BLOCK_D), 0.0, WORK)
    b_max = tl.full((BLOCK_Q,), float("-inf"), WORK)
    b_sum = tl.full((BLOCK_Q,), 0.0, WORK)
    whole, stop = key_stops(o_start, query_len, key_len, CAUSAL, BLOCK_Q, BLOCK_K)
    for k_start in range(0, whole, BLOCK_K):
        o_k = k_start + tl.arange(0, BLOCK_K)
        b_k = load_rows(p_k, k_strides, o_k, key_len, HEAD_DIM, BLOCK_D, False)
        b_v = load_rows(p_v, v_strides, o_k, key_len, HEAD_DIM, BLOCK_D, False)
        b_s = scores(b_q, operand(b_k, OPERANDS, WORK), SCALE, SCORES, WORK)
        b_v = operand(b_v, OPERANDS, WORK)
        b_acc, b_max, b_sum = _update(
            b_s, b_v, b_acc, b_max, b_sum, WORK, STATISTICS, PROBABILITIES, ACCUMULATOR
        )
    for k_start in range(whole, stop, BLOCK_K):
        o_k = k_start + tl.arange(0, BLOCK_K)
        b_k = load_rows(p_k, k_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
        b_v = load_rows(p_v, v_strides, o_k, key_len, HEAD_DIM, BLOCK_D, True)
        b_s = scores(b_q, operand(b_k, OPERANDS, WORK), SCALE, SCORES, WORK)
        b_s = mask_scores(b_s, o_q[:, None], o_k[None, :], query_len, key_len, CAUSAL)
        b_v = operand(b_v, OPERANDS, WORK)
        b_acc, b_max, b_sum = _update(
            b_s, b_v, b_acc, b_max, b_sum, WORK, STATISTICS, PROBABILITIES, ACCUMULATOR
        )

    # A row that attends nothing has sum 0 and max -inf: out 0, lse -inf.
    b_sum = tl.where(b_sum == 0.0, 1.0, b_sum)
    b_out = round_to(divide(b_acc, b_sum[:, None]), OUTPUT)
    p_out = at_head(p_out, out_strides, o_batch, o_head)
    store_rows(p_out, out_strides, o_q, query_len, b_out, HEAD_DIM)
    b_lse = round_to(b_max + tl.log(b_sum), LSE)
    p_lse = at_row(p_lse, o_batch, o_head, heads, query_len)
    tl.store(p_lse + o_q, b_lse, mask=o_q < query_len)
