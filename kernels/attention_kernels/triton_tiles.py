"""What the forward and backward kernels do alike to a tile: place it, load, score, mask, store.

Index blocks `o_q` and `o_k` come shaped to broadcast, `[:, None]` or `[None, :]`, so that the same
steps serve score blocks [BLOCK_Q, BLOCK_K] and transposed ones. Leaves out rounding
(`triton_rounding`) and the recurrences themselves.
"""

import triton
import triton.language as tl

from attention_kernels.triton_rounding import dot, round_to, widen_index


@triton.jit
def first_row(length, BLOCK: tl.constexpr):
    """Return the first row of this program's block; programs run over the rows of a head first."""
    return tl.program_id(0) % ((length + BLOCK - 1) // BLOCK) * BLOCK


@triton.jit
def batch_and_head(length, heads, BLOCK: tl.constexpr):
    """Return the batch and the head of this program."""
    sequence = tl.program_id(0) // ((length + BLOCK - 1) // BLOCK)
    return sequence // heads, sequence % heads


@triton.jit
def at_head(p_tensor, strides, o_batch, o_head):
    """Return the pointer to row 0 of one head."""
    return p_tensor + widen_index(o_batch) * strides[0] + widen_index(o_head) * strides[1]


@triton.jit
def load_rows(
    p_head,
    strides,
    o_rows,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr,
):
    """Load rows of a head, [rows, BLOCK_D]: zero past HEAD_DIM and, with TAIL, past `rows`."""
    o_dim = tl.arange(0, BLOCK_D)
    p_rows = p_head + widen_index(o_rows)[:, None] * strides[2] + o_dim[None, :] * strides[3]
    if TAIL:
        m_rows = (o_rows[:, None] < rows) & (o_dim[None, :] < HEAD_DIM)
        b_rows = tl.load(p_rows, mask=m_rows, other=0.0)
    elif BLOCK_D == HEAD_DIM:
        b_rows = tl.load(p_rows)
    else:
        b_rows = tl.load(p_rows, mask=o_dim[None, :] < HEAD_DIM, other=0.0)
    return b_rows


@triton.jit
def store_rows(p_head, strides, o_rows, rows, b_rows, HEAD_DIM: tl.constexpr):
    """Store the rows before `rows` and the dimensions before HEAD_DIM."""
    o_dim = tl.arange(0, b_rows.shape[1])
    p_rows = p_head + widen_index(o_rows)[:, None] * strides[2] + o_dim[None, :] * strides[3]
    tl.store(p_rows, b_rows, mask=(o_rows[:, None] < rows) & (o_dim[None, :] < HEAD_DIM))


@triton.jit
def at_row(p_rows, o_batch, o_head, heads, rows):
    """Return the pointer to row 0 of one head in a contiguous (batch, heads, rows) tensor."""
    return p_rows + (widen_index(o_batch) * heads + o_head) * rows


@triton.jit
def key_stops(o_start, query_len, key_len, CAUSAL: tl.constexpr, BLOCK_Q, BLOCK_K):
    """Return where the key blocks end that every row of a query block sees whole, and any sees."""
    if CAUSAL:
        offset = key_len - query_len
        whole = tl.maximum(tl.minimum(key_len, o_start + 1 + offset), 0)
        stop = tl.minimum(o_start + BLOCK_Q, query_len) + offset
    else:
        whole = key_len
        stop = key_len
    return whole // BLOCK_K * BLOCK_K, stop


@triton.jit
def scores(b_left, b_right, SCALE: tl.constexpr, SCORES: tl.constexpr, WORK: tl.constexpr):
    """Return R_scores(SCALE * left right^T); SCALE is constexpr: a float argument is FP32."""
    return round_to(dot(b_left, tl.trans(b_right), WORK) * SCALE, SCORES)


@triton.jit
def mask_scores(b_scores, o_q, o_k, query_len, key_len, CAUSAL: tl.constexpr):
    """Return the scores with -inf where the query may not attend the key (`masks.hidden_keys`)."""
    m_visible = o_k < key_len
    if CAUSAL:
        m_visible = m_visible & (o_k <= o_q + key_len - query_len)
    return tl.where(m_visible, b_scores, float("-inf"))


@triton.jit
def finite_or_zero(b):
    """Return 0 for -inf: what a row that attends nothing subtracts, so exp gives 0, not NaN."""
    return tl.where(b == float("-inf"), 0.0, b)


@triton.jit
def row_sum(b, AXIS: tl.constexpr):
    """Sum along AXIS; `tl.sum` is itself jitted, which the interpreter can't call from outside."""
    return tl.reduce(b, AXIS, tl.standard._sum_combine)


@triton.jit
def row_max(b, AXIS: tl.constexpr):
    """Maximum along AXIS, by `tl.reduce` for the reason given at `row_sum`."""
    return tl.reduce(b, AXIS, tl.standard._elementwise_max)
