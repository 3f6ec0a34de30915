"""Which blocks a kernel walks: whole-number functions of lengths, window and blocks, and no more.

A position is one in its sequence; a query at o_q stands at key o_q + offset, bottom-right aligned,
and sees the keys from `left` before to `right` after it. Spans are [first, stop) of positions. The
tests run these functions, as Python, over all small sizes, against the mask's definition.

All sums fit 32 bits where lengths are below `arguments.MAX_LEN`, and the window with them.
"""

# `N` is annotated as Triton wants it, which hides its fields from pyright.
# pyright: reportAttributeAccessIssue=false

import triton
import triton.language as tl


@triton.jit
def key_span(o_start, query_len, key_len, left, right, N: tl.constexpr):
    """Return the key blocks that positions allow to any row of a query block: first, stop."""
    offset = key_len - query_len
    first = 0
    stop = key_len
    if N.has_left:
        first = tl.maximum(o_start + offset - left, 0) // N.block_k * N.block_k
    if N.has_right:
        last_row = tl.minimum(o_start + N.block_q, query_len)
        stop = tl.minimum(key_len, last_row + offset + right)
    # Programs past the end of a packed sequence attend nothing.
    return first, tl.where(o_start < query_len, stop, 0)


@triton.jit
def hidden_span(first, stop, o_start, query_len, key_len, N: tl.constexpr):
    """Return the span, or all key blocks where one hidden from a row moves its maximum."""
    if N.moves_hidden:
        first = 0
        stop = tl.where(o_start < query_len, key_len, 0)
    return first, stop


@triton.jit
def whole_span(o_start, query_len, key_len, left, right, first, stop, N: tl.constexpr):
    """Return the key blocks inside [first, stop) that every row sees whole: begin, end."""
    offset = key_len - query_len
    begin = first
    end = stop // N.block_k * N.block_k
    if N.has_left:
        seen = tl.maximum(o_start + N.block_q - 1 + offset - left, 0)
        begin = tl.maximum(first, (seen + N.block_k - 1) // N.block_k * N.block_k)
    if N.has_right:
        seen = tl.maximum(o_start + offset + right + 1, 0)
        end = tl.minimum(end, seen // N.block_k * N.block_k)
    if N.has_tensors:
        end = first
    end = tl.maximum(end, first)
    return tl.minimum(begin, end), end


@triton.jit
def row_span(o_start, query_len, key_len, left, right, N: tl.constexpr):
    """Return the query blocks of which any row may see any key of a key block: first, stop."""
    offset = key_len - query_len
    first = 0
    stop = query_len
    if N.has_right:
        first = tl.maximum(o_start - offset - right, 0) // N.block_q * N.block_q
    if N.has_left:
        stop = tl.minimum(query_len, o_start + N.block_k + left - offset)
    return first, tl.where(o_start < key_len, stop, 0)


@triton.jit
def whole_row_span(o_start, query_len, key_len, left, right, first, stop, N: tl.constexpr):
    """Return the query blocks of which every row sees every key of a key block: begin, end.

    Keys past `key_len` do not count. They part [first, stop) in three: what ends at `begin` is cut
    on the right, what starts at `end` on the left, or by the last query.
    """
    offset = key_len - query_len
    begin = first
    end = stop // N.block_q * N.block_q
    if N.has_right:
        last_key = tl.minimum(o_start + N.block_k, key_len) - 1
        seen = tl.maximum(last_key - offset - right, 0)
        # no further than the last block
        seen = tl.minimum(seen, tl.maximum(stop, 0))
        begin = tl.maximum(first, (seen + N.block_q - 1) // N.block_q * N.block_q)
    if N.has_left:
        seen = tl.maximum(o_start + left - offset + 1, 0)
        end = tl.minimum(end, seen // N.block_q * N.block_q)
    return begin, tl.maximum(end, begin)


@triton.jit
def split_span(first, stop, key_len, o_split, N: tl.constexpr):
    """Return the part of [first, stop) that is in this split's share of the key blocks."""
    if N.splits > 1:
        blocks = (key_len + N.block_k - 1) // N.block_k
        share = (blocks + N.splits - 1) // N.splits * N.block_k
        first = tl.maximum(first, o_split * share)
        stop = tl.maximum(tl.minimum(stop, (o_split + 1) * share), first)
    return first, stop
