"""What the kernels do alike to a tile: round, place, load, score, mask, store.

Index blocks `o_q` and `o_k` come shaped to broadcast, `[:, None]` or `[None, :]`, so that the same
steps serve score blocks [BLOCK_Q, BLOCK_K] and transposed ones. `N` is an `arguments.Constants`.
Leaves out how a block is rounded (`rounding`) and the recurrences (`forward`, `backward`).
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl

from attention_kernels.triton.rounding import (
    divide,
    dot,
    exponential,
    fold,
    number,
    power_of_two,
    random_bits,
    round_to,
    tanh,
    to_word,
    to_work,
    whole,
    widen_index,
)


@triton.constexpr_function
def format_at(N, POINT):
    """Return the name of the format that a point rounds to."""
    return next(format for point, format, _ in N.points if point == POINT)


@triton.constexpr_function
def stream_at(N, POINT):
    """Return the stream of a point's random bits."""
    return next(stream for point, _, stream in N.points if point == POINT)


@triton.jit
def rounded(b, POINT: tl.constexpr, N: tl.constexpr, step, n, o_row, o_col):
    """Round a block once, at a point of `POINTS`; step, head and indices say where it lies.

    `n` is the head as `head_number` gives it.
    """
    FORMAT: tl.constexpr = format_at(N, POINT)
    if N.rounding == "stochastic":
        STREAM: tl.constexpr = stream_at(N, POINT)
        b_bits = random_bits(n[0], STREAM, step, n[1], o_row, o_col)
        b_round = round_to(b, FORMAT, N.rounding, b_bits)
    else:
        b_round = round_to(b, FORMAT, N.rounding, 0)
    return b_round


@triton.jit
def head_number(masks, o_batch, o_head, heads, GROUP: tl.constexpr, N: tl.constexpr):
    """Return the word that a call draws by, and the number of a head among all of its batch.

    `heads` and `o_head` are k's, of GROUP query heads each, if GROUP is not 1. The batch and the
    heads of a call may be those of several ranks (`rounding_key`).
    """
    word = 0
    n = o_batch * heads + o_head
    if N.rounding == "stochastic":
        scalars = masks.scalars
        word = whole(scalars.rounding)
        first = whole(scalars.first_batch) + o_batch
        n = first * (whole(scalars.heads) // GROUP) + whole(scalars.first_head) // GROUP + o_head
    return word, n


@triton.jit
def kept(masks, o_batch, o_head, o_q, o_k, N: tl.constexpr):
    """Return where dropout keeps the weights of a tile (`dropout.keep_tile`); 1 without it."""
    m_kept = 1
    if N.has_dropout:
        head = fold(fold(whole(masks.scalars.dropout), o_batch), o_head)
        m_kept = fold(fold(head, o_q), o_k) >= to_word(whole(masks.scalars.dropped_below))
    return m_kept


@triton.jit
def drop(b, m_kept, N: tl.constexpr):
    """Return a tile with zeros for what dropout leaves out; it is not scaled."""
    if N.has_dropout:
        b = tl.where(m_kept, b, 0.0)
    return b


@triton.jit
def scale_kept(b, masks, N: tl.constexpr):
    """Return a sum of what dropout has kept, divided by the probability of keeping."""
    if N.has_dropout:
        b = b * number(masks.scalars.kept_scale, N.work)
    return b


@triton.jit
def place(length, heads, BLOCK: tl.constexpr):
    """Return first row, head and batch of this program; the rows of a head come first."""
    blocks = (length + BLOCK - 1) // BLOCK
    sequence = tl.program_id(0) // blocks
    return tl.program_id(0) % blocks * BLOCK, sequence % heads, sequence // heads


@triton.jit
def bounds(p_offsets, o_batch, rows, N: tl.constexpr):
    """Return where the rows of a sequence begin in its tensor, and how many there are."""
    first = 0
    length = rows
    if N.packed:
        first = tl.load(p_offsets + o_batch)
        length = tl.load(p_offsets + o_batch + 1) - first
    return first, length


@triton.jit
def at_head(p_tensor, strides, o_batch, o_head, o_first, N: tl.constexpr):
    """Return the pointer to row `o_first` of one head; packed tensors are a batch of one."""
    if N.packed:
        p_tensor = p_tensor + widen_index(o_first) * strides[2]
    else:
        p_tensor = p_tensor + widen_index(o_batch) * strides[0]
    return p_tensor + widen_index(o_head) * strides[1]


@triton.jit
def at_row(p_rows, o_batch, o_head, heads, rows, o_first, N: tl.constexpr):
    """Return the pointer to row `o_first` of a head in a contiguous (batch, heads, rows)."""
    if N.packed:
        p_rows = p_rows + widen_index(o_head) * rows + o_first
    else:
        p_rows = p_rows + (widen_index(o_batch) * heads + o_head) * rows
    return p_rows


@triton.jit
def at_part(p_tensor, strides, o_part, o_head, o_first):
    """Return the pointer to row `o_first` of one head of one part: a sequence, a split of one."""
    p_part = p_tensor + widen_index(o_part) * strides[0] + widen_index(o_head) * strides[1]
    return p_part + widen_index(o_first) * strides[2]


@triton.jit
def at_part_row(p_rows, o_part, o_head, heads, rows, o_first):
    """Return the pointer to row `o_first` in a contiguous (parts, heads, rows)."""
    return p_rows + (widen_index(o_part) * heads + o_head) * rows + o_first


@triton.constexpr_function
def width(N, OF_V):
    """Return head_dim and its block: those of v, dout and out with OF_V, else those of q and k."""
    return (N.v_head_dim, N.block_v) if OF_V else (N.head_dim, N.block_d)


@triton.jit
def load_rows(
    p_head, strides, o_rows, rows, N: tl.constexpr, TAIL: tl.constexpr, OF_V: tl.constexpr
):
    """Load rows of a head, [rows, block_d]: zero past head_dim and, with TAIL, past `rows`.

    With OF_V they are rows of v, dout or out, [rows, block_v].
    """
    HEAD_DIM: tl.constexpr = width(N, OF_V)[0]
    BLOCK: tl.constexpr = width(N, OF_V)[1]
    o_dim = tl.arange(0, BLOCK)
    p_rows = (
        p_head
        + widen_index(o_rows)[:, None] * strides[2]
        + widen_index(o_dim)[None, :] * strides[3]
    )
    if TAIL:
        m_rows = (o_rows[:, None] < rows) & (o_dim[None, :] < HEAD_DIM)
        b_rows = tl.load(p_rows, mask=m_rows, other=0.0)
    elif BLOCK == HEAD_DIM:
        b_rows = tl.load(p_rows)
    else:
        b_rows = tl.load(p_rows, mask=o_dim[None, :] < HEAD_DIM, other=0.0)
    return b_rows


@triton.jit
def store_rows(p_head, strides, o_rows, rows, b_rows, N: tl.constexpr, OF_V: tl.constexpr):
    """Store the rows before `rows` and the dimensions before head_dim; OF_V as in `load_rows`."""
    HEAD_DIM: tl.constexpr = width(N, OF_V)[0]
    BLOCK: tl.constexpr = width(N, OF_V)[1]
    o_dim = tl.arange(0, BLOCK)
    p_rows = (
        p_head
        + widen_index(o_rows)[:, None] * strides[2]
        + widen_index(o_dim)[None, :] * strides[3]
    )
    tl.store(p_rows, b_rows, mask=(o_rows[:, None] < rows) & (o_dim[None, :] < HEAD_DIM))


@triton.jit
def load_factor(p_factors, o_batch, o_head, heads, blocks, o_block, N: tl.constexpr):
    """Return the factor of one block of rows, 1 where operands are not scaled."""
    factor = 1.0
    if N.scaled:
        factor = tl.load(p_factors + (widen_index(o_batch) * heads + o_head) * blocks + o_block)
    return factor


@triton.jit
def tile_scores(
    b_left,
    b_right,
    factor,
    masks,
    o_batch,
    o_head,
    o_q,
    o_k,
    query_len,
    key_len,
    n,
    N: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Return R_scores(softcap(scale * left right^T) + bias), -inf where hidden, and the tanh.

    With `raw_scores` there is no scale, and nothing is added. The tanh of the softcap is what its
    gradient needs; without one it is 0.
    """
    b_scores = dot(b_left, tl.trans(b_right), N.work, N.dot)
    if N.scaled:
        b_scores = b_scores * factor
    b_scores = rounded(b_scores, "products", N, 0, n, o_q, o_k)
    if not N.raw_scores:
        b_scores = b_scores * number(masks.scalars.scale, N.work)
    b_tanh = 0.0
    if N.has_softcap:
        softcap = number(masks.scalars.softcap, N.work)
        b_tanh = tanh(divide(b_scores, softcap))
        b_scores = b_tanh * softcap
    b_scores = _add_bias(b_scores, masks, o_batch, o_head, o_q, o_k, query_len, key_len, N)
    # Before anything is hidden: a format without infinities would turn -inf into NaN.
    b_scores = rounded(b_scores, "scores", N, 0, n, o_q, o_k)
    if MASKED:
        b_scores = _hide(b_scores, masks, o_batch, o_head, o_q, o_k, query_len, key_len, N)
    return b_scores, b_tanh


@triton.jit
def _add_bias(b_scores, masks, o_batch, o_head, o_q, o_k, query_len, key_len, N: tl.constexpr):
    if N.has_bias:
        m_inside = (o_q < query_len) & (o_k < key_len)
        p_bias = at_tile(masks.bias, masks.bias_strides, o_batch, o_head, o_q, o_k)
        b_added = to_work(tl.load(p_bias, mask=m_inside, other=0.0), N.work)
        if N.has_slopes:
            b_added = b_added + _alibi(masks, o_batch, o_head, o_q, o_k, query_len, key_len, N)
        b_scores = b_scores + b_added
    elif N.has_slopes:
        b_scores = b_scores + _alibi(masks, o_batch, o_head, o_q, o_k, query_len, key_len, N)
    return b_scores


@triton.jit
def _alibi(masks, o_batch, o_head, o_q, o_k, query_len, key_len, N: tl.constexpr):
    b_distance = to_work(tl.abs(o_k - (o_q + key_len - query_len)), N.work)
    slope = tl.load(masks.slopes + widen_index(o_batch) * masks.slopes_batch + o_head)
    return b_distance * -to_work(slope, N.work)


@triton.jit
def at_tile(p_tensor, strides, o_batch, o_head, o_q, o_k):
    """Return pointers to a tile of a `(batch, heads, query_len, key_len)` tensor."""
    p_head = p_tensor + widen_index(o_batch) * strides[0] + widen_index(o_head) * strides[1]
    return p_head + widen_index(o_q) * strides[2] + widen_index(o_k) * strides[3]


@triton.jit
def _hide(b_scores, masks, o_batch, o_head, o_q, o_k, query_len, key_len, N: tl.constexpr):
    """Return the scores with -inf where the query may not attend the key (`masks.Mask.hidden`)."""
    offset = key_len - query_len
    # Keys past the end were loaded as zeros; their scores of 0 must not join the sum.
    m_visible = o_k < key_len
    if N.has_right:
        m_visible = m_visible & (o_k <= o_q + offset + whole(masks.scalars.right))
    if N.has_left:
        m_visible = m_visible & (o_k >= o_q + offset - whole(masks.scalars.left))
    if N.has_padding:
        p_keys = at_tile(masks.padding, masks.padding_strides, o_batch, o_head, o_q, o_k)
        m_inside = (o_q < query_len) & (o_k < key_len)
        m_visible = m_visible & (tl.load(p_keys, mask=m_inside, other=0) != 0)
    if N.has_visible:
        m_inside = (o_q < query_len) & (o_k < key_len)
        p_seen = at_tile(masks.visible, masks.visible_strides, o_batch, o_head, o_q, o_k)
        m_visible = m_visible & (tl.load(p_seen, mask=m_inside, other=0) != 0)
    if N.has_blocks:
        m_visible = m_visible & _in_block(masks, o_batch, o_head, o_q, o_k, query_len, key_len, N)
    return tl.where(m_visible, b_scores, float("-inf"))


@triton.jit
def _in_block(masks, o_batch, o_head, o_q, o_k, query_len, key_len, N: tl.constexpr):
    """Return what a mask_mod lets be seen, by its table and tiles (`mask_mod.block_table`)."""
    m_inside = (o_q < query_len) & (o_k < key_len)
    o_line, o_column = o_q // N.block_q, o_k // N.block_k
    p_table = at_tile(masks.table, masks.table_strides, o_batch, o_head, o_line, o_column)
    b_tile = tl.load(p_table, mask=m_inside, other=-2)
    o_inside = (o_q % N.block_q) * N.block_k + o_k % N.block_k
    p_tile = masks.tiles + widen_index(b_tile) * (N.block_q * N.block_k) + o_inside
    b_part = tl.load(p_tile, mask=m_inside & (b_tile >= 0), other=0)
    # -1 is `mask_mod.FULL`; of an empty tile nothing is loaded
    return (b_tile == -1) | (b_part != 0)


@triton.jit
def natural(b_score, masks, N: tl.constexpr):
    """Return a kept score as what e is raised to, as the LSE has it."""
    return b_score * number(masks.scalars.scale, N.work) if N.raw_scores else b_score


@triton.jit
def weight(b_exponent, N: tl.constexpr):
    """Return the power of e, or with `fold` of 2."""
    return power_of_two(b_exponent, N.exp) if N.fold else exponential(b_exponent, N.exp)


@triton.jit
def finite_or_zero(b):
    """Return 0 for -inf: what a row that attends nothing subtracts, so exp gives 0, not NaN."""
    return tl.where(b == float("-inf"), 0.0, b)


@triton.jit
def one_for_zero(b):
    """Return 1 for 0: what a row that attends nothing is divided by."""
    return tl.where(b == 0.0, 1.0, b)


@triton.jit
def row_sum(b, AXIS: tl.constexpr):
    """Sum along AXIS; `tl.sum` is itself jitted, which the interpreter can't call from outside."""
    return tl.reduce(b, AXIS, tl.standard._sum_combine)


@triton.jit
def row_max(b, AXIS: tl.constexpr):
    """Maximum along AXIS, by `tl.reduce` for the reason given at `row_sum`."""
    return tl.reduce(b, AXIS, tl.standard._elementwise_max)
