"""The spans that kernels walk, as they are written, over every small size: no block lost or idle.

The functions run as Python, compiled by numba, on whole numbers. What they are held against knows
the window alone: which keys a query sees. On 32 bits they are run with numbers that remember how
large they have become.
"""

import itertools
from collections import namedtuple
from types import FunctionType, ModuleType, SimpleNamespace

import numba
import numpy as np
import pytest
import torch

from attention_kernels import PROFILES
from attention_kernels.api import flash_attention
from attention_kernels.masks import Mask
from attention_kernels.testing import Shape, make_qkv
from attention_kernels.triton import spans
from attention_kernels.triton.arguments import MAX_LEN, constants_of, lengths_of, narrower

Sizes = namedtuple(
    "Sizes", "has_left left has_right right block_q block_k has_tensors splits moves_hidden"
)
SPANS = ("key_span", "hidden_span", "whole_span", "row_span", "whole_row_span", "split_span")
FAULTS = ("lost", "idle", "unaligned", "whole", "missed", "split", "hidden")


def language():
    """Triton's operators on whole numbers: what `tl` is where numba compiles the spans."""
    operators = ModuleType("tl")
    operators.__dict__.update(
        maximum=numba.njit(lambda x, y: max(x, y)),
        minimum=numba.njit(lambda x, y: min(x, y)),
        where=numba.njit(lambda condition, x, y: x if condition else y),
    )
    return operators


def as_python(name, language, changed=()):
    """A span function of the kernels with another `tl`, and other names if asked for."""
    code, others = getattr(spans, name).fn.__code__, dict(changed)
    names = tuple(others.get(name, name) for name in code.co_names)
    span = FunctionType(code.replace(co_names=names), {"tl": language}, name)
    given = code.co_varnames[: code.co_argcount]
    if not others.keys() & set(given):
        return span
    # of an argument: the function is handed another one, or a constant of N
    other = [others.get(x, x) for x in given]
    other = [x if x in given else f"N.{x}" for x in other]
    namespace = {"span": numba.njit(span)}
    exec(f"def {name}({', '.join(given)}): return span({', '.join(other)})", namespace)
    return namespace[name]


@numba.njit
def sees(query, query_len, key_len, N):
    """The keys [low, high) that a query sees."""
    at = query + key_len - query_len
    low = max(0, at - N.left) if N.has_left else 0
    high = min(key_len, at + N.right + 1) if N.has_right else key_len
    return low, max(low, high)


@numba.njit
def add_covered(span, seen, block, is_past, faults):
    """Add what is wrong with a span of blocks that has to cover the positions seen."""
    (first, stop), (low, high) = span, seen
    faults[2] += first % block != 0
    if low < high:
        faults[0] += first > low or stop < high
        faults[1] += first + block <= low or stop > -(-high // block) * block
    elif is_past:
        faults[1] += stop > first


@numba.njit
def add_keys(o_start, query_len, key_len, N, key_span, faults):
    low, high = key_len, 0
    for query in range(o_start, min(o_start + N.block_q, query_len)):
        begin, end = sees(query, query_len, key_len, N)
        if begin < end:
            low, high = min(low, begin), max(high, end)
    first, stop = key_span(o_start, query_len, key_len, N.left, N.right, N)
    add_covered((first, stop), (low, high), N.block_k, o_start >= query_len, faults)
    return first, stop


@numba.njit
def add_hidden(o_start, query_len, key_len, N, hidden_span, span, faults):
    """Add whether the span is another one than all keys where hidden ones count, else the same."""
    found = hidden_span(*span, o_start, query_len, key_len, N)
    if N.moves_hidden:
        faults[6] += found != (0, key_len if o_start < query_len else 0)
    else:
        faults[6] += found != span
    return found


@numba.njit
def add_rows(o_start, query_len, key_len, N, row_span, faults):
    low, high = query_len, 0
    for query in range(query_len):
        begin, end = sees(query, query_len, key_len, N)
        if max(begin, o_start) < min(end, o_start + N.block_k):
            low, high = min(low, query), max(high, query + 1)
    span = row_span(o_start, query_len, key_len, N.left, N.right, N)
    add_covered(span, (low, high), N.block_q, o_start >= key_len, faults)
    return span


@numba.njit
def add_whole_rows(o_start, query_len, key_len, N, whole_row_span, span, faults):
    """Add what is wrong with the query blocks that are walked without a mask."""
    first, stop = span
    begin, end = whole_row_span(o_start, query_len, key_len, N.left, N.right, first, stop, N)
    faults[3] += begin < first or end < begin
    faults[2] += (begin - first) % N.block_q != 0 or (end - first) % N.block_q != 0
    for q_start in range(first, stop, N.block_q):
        seen = True
        for query in range(q_start, min(q_start + N.block_q, query_len)):
            low, high = sees(query, query_len, key_len, N)
            seen = seen and low <= o_start and min(o_start + N.block_k, key_len) <= high
        is_whole = seen and q_start + N.block_q <= stop
        is_inside = begin <= q_start < end
        faults[3] += is_inside and not is_whole
        faults[4] += is_whole and not is_inside
        # what comes after is masked where there is a bound on the left, and else only cut short
        faults[3] += q_start >= end and not N.has_left and not seen


@numba.njit
def add_whole(o_start, query_len, key_len, N, whole_span, span, faults):
    """Add what is wrong with the blocks that are walked without a mask."""
    first, stop = span
    low, high = 0, key_len
    for query in range(o_start, o_start + N.block_q):
        begin, end = sees(query, query_len, key_len, N)
        low, high = max(low, begin), min(high, end)
    begin, end = whole_span(o_start, query_len, key_len, N.left, N.right, first, stop, N)
    blocks = 0
    for k_start in range(first, stop, N.block_k):
        is_inside = begin <= k_start < end
        is_whole = low <= k_start and k_start + N.block_k <= min(high, stop)
        is_whole = is_whole and not N.has_tensors
        faults[3] += is_inside and not is_whole
        faults[4] += is_whole and not is_inside and o_start < query_len
        blocks += is_inside
    # else the rest of [first, stop), which is walked with a mask, is not what is left
    faults[3] += blocks * N.block_k != end - begin or begin < first


@numba.njit
def add_splits(key_len, N, split_span, span, faults):
    """Add what is wrong with the shares of a span: together they are the span, in order."""
    first, stop = span
    at = first
    for split in range(N.splits):
        its_first, its_stop = split_span(first, stop, key_len, split, N)
        if its_first < its_stop:
            faults[5] += its_first != at or its_stop > stop or its_first % N.block_k != 0
            at = its_stop
    faults[5] += first < stop and at != stop


@numba.njit
def add_all(
    query_len,
    key_len,
    N,
    key_span,
    hidden_span,
    whole_span,
    row_span,
    whole_row_span,
    split_span,
    faults,
):
    """Add the faults of every start; one block more than there is: past a packed sequence."""
    for o_start in range(0, query_len + N.block_q, N.block_q):
        span = add_keys(o_start, query_len, key_len, N, key_span, faults)
        span = add_hidden(o_start, query_len, key_len, N, hidden_span, span, faults)
        add_whole(o_start, query_len, key_len, N, whole_span, span, faults)
        add_splits(key_len, N, split_span, span, faults)
    for o_start in range(0, key_len + N.block_k, N.block_k):
        span = add_rows(o_start, query_len, key_len, N, row_span, faults)
        if o_start < key_len:
            add_whole_rows(o_start, query_len, key_len, N, whole_row_span, span, faults)


@numba.njit
def count_faults(
    lengths, blocks, others, key_span, hidden_span, whole_span, row_span, whole_row_span, split_span
):
    """Count every kind of fault over all lengths, windows and starts; a bound of -1 is none."""
    faults = np.zeros(7, np.int64)
    for query_len in range(1, lengths + 1):
        for key_len in range(1, lengths + 1):
            for left in range(-1, lengths + 2):
                for right in range(-1, lengths + 2):
                    for block_q, block_k in blocks:
                        bounds = left >= 0, max(left, 0), right >= 0, max(right, 0)
                        N = Sizes(*bounds, block_q, block_k, *others)
                        add_all(
                            query_len,
                            key_len,
                            N,
                            key_span,
                            hidden_span,
                            whole_span,
                            row_span,
                            whole_row_span,
                            split_span,
                            faults,
                        )
    return faults


def faults_of(lengths, blocks, *, tensors=False, splits=3, moves_hidden=False, changed=()):
    """Count the faults of the spans by kind; `changed` are (function, name, its other name)."""
    tl = language()
    changes = {name: [(old, new)] for name, old, new in changed}
    functions = [numba.njit(as_python(name, tl, changes.get(name, ()))) for name in SPANS]
    others = tensors, splits, moves_hidden
    found = count_faults(lengths, np.array(blocks), others, *functions)
    return {name: int(n) for name, n in zip(FAULTS, found, strict=True) if n}


SMALL = [(1, 1), (2, 3), (3, 2), (4, 4), (5, 1), (8, 4)]


def test_no_block_is_lost_and_none_is_idle_at_any_small_size():
    assert faults_of(12, SMALL) == {}


def test_all_blocks_are_walked_at_any_small_size_where_hidden_keys_count():
    assert faults_of(9, SMALL, moves_hidden=True) == {}


@pytest.mark.long
def test_no_block_is_lost_and_none_is_idle_at_any_size_to_70():
    blocks = [(16, 16), (16, 64), (64, 16), (32, 32), (64, 64), (7, 5)]
    assert faults_of(70, blocks) == {}


def test_another_bound_in_a_span_is_found():
    assert "lost" in faults_of(9, SMALL, changed=[("row_span", "left", "has_left")])
    assert "whole" in faults_of(9, SMALL, changed=[("whole_row_span", "right", "has_right")])


class Watched(int):
    """A whole number that remembers the largest that any of its kind has been."""

    most = 0

    @classmethod
    def of(cls, value):
        cls.most = max(cls.most, abs(int(value)))
        return cls(value)

    def __add__(self, other):
        return Watched.of(int(self) + int(other))

    def __sub__(self, other):
        return Watched.of(int(self) - int(other))

    def __mul__(self, other):
        return Watched.of(int(self) * int(other))

    def __floordiv__(self, other):
        return Watched.of(int(self) // int(other))

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other):
        return Watched.of(int(other) - int(self))


def largest_number(longest, window=None):
    """The largest number in any span, over the corners of what lengths up to `longest` allow.

    The window is as wide as the lengths, unless it is given.
    """
    operators = SimpleNamespace(
        maximum=lambda x, y: Watched.of(max(x, y)),
        minimum=lambda x, y: Watched.of(min(x, y)),
        where=lambda condition, x, y: Watched.of(x if condition else y),
    )
    spans = (as_python(name, operators) for name in SPANS)
    key_span, hidden_span, whole_span, row_span, whole_row_span, split_span = spans
    Watched.most = 0
    lengths = (1, longest)
    for query_len, key_len, bounded in itertools.product(lengths, lengths, (False, True)):
        widest = window or (key_len - 1, query_len - 1)
        for left, right in itertools.product((0, widest[0]), (0, widest[1])):
            for block_q, block_k in itertools.product((16, 256), (16, 256)):
                sizes = Sizes(bounded, left, bounded, right, block_q, block_k, False, 4, True)
                lens = tuple(map(Watched, (query_len, key_len, left, right)))
                # a packed sequence may be far shorter than the longest, whose starts it gets
                for o_start in (0, longest // block_q * block_q):
                    span = key_span(Watched(o_start), *lens, sizes)
                    hidden = hidden_span(*span, Watched(o_start), *lens[:2], sizes)
                    for first, stop in (span, hidden):
                        whole_span(Watched(o_start), *lens, first, stop, sizes)
                        split_span(first, stop, lens[1], 3, sizes)
                for o_start in (0, longest // block_k * block_k):
                    first, stop = row_span(Watched(o_start), *lens, sizes)
                    whole_row_span(Watched(o_start), *lens, first, stop, sizes)
    return Watched.most


def test_no_sum_of_places_passes_32_bits():
    assert largest_number(MAX_LEN - 1) < 2**31
    assert largest_number(2**30) >= 2**31, "the limit is no smaller than it has to be"


def test_a_sequence_beyond_the_limit_is_refused():
    rows = torch.empty(1, 1, 1, 16).expand(1, 1, MAX_LEN, 16)
    short = torch.empty(1, 1, 1, 16)
    with pytest.raises(ValueError, match=r"query_len must be below 536870912 .* got 536870912"):
        lengths_of(Mask(), rows, short)
    with pytest.raises(ValueError, match=r"key_len must be below 536870912"):
        lengths_of(Mask(), short, rows)


@pytest.mark.parametrize("window", [(2**31 - 1, 3), (2**40, 3), (3, 2**31 - 1), (3, 2**40)])
def test_a_window_beyond_every_key_is_none(window):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(Shape(1, 1, 1, 40, 37, 16), torch.float32, generator)
    dout = torch.randn(q.shape, generator=generator)
    near = [None if side > 2**30 else side for side in window]
    results = []
    for left, right in (window, near):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = flash_attention(*leaves, window=(left, right), engine="triton")
        out.backward(dout)
        results.append([out.detach(), *(x.grad for x in leaves)])
    assert all(map(torch.equal, *results))


def test_only_a_bound_that_hides_nothing_is_left_out():
    q, k = torch.empty(1, 1, 5, 16), torch.empty(1, 1, 9, 16)
    for left, right in itertools.product(range(12), range(12)):
        mask = Mask(window=(left, right))
        found = constants_of(q, k, k, mask=mask, scale=1.0, numerics=PROFILES["golden"])
        queries, keys = torch.arange(5)[:, None] + 4, torch.arange(9)[None]
        assert found.has_left == (left < 9)
        assert found.has_right == (right < 5)
        assert found.has_left or not (keys < queries - left).any()
        assert found.has_right or not (keys > queries + right).any()


@pytest.mark.parametrize("window", [(2**31 - 2, 3), (3, 2**31 - 2)])
def test_a_window_beyond_every_packed_sequence_is_none(window):
    """Of 2**31 - 1 rows in all: each sequence is shorter than MAX_LEN."""
    rows = torch.empty(1, 1, 2**31 - 1, 16, device="meta")
    assert largest_number(MAX_LEN - 1, window) >= 2**31, "sums with it would wrap around"
    assert narrower(window, rows, rows) == tuple(x if x == 3 else None for x in window)
    assert narrower((MAX_LEN, MAX_LEN), rows, rows) == (None, None)
    assert narrower((MAX_LEN - 1, MAX_LEN - 1), rows, rows) == (MAX_LEN - 1, MAX_LEN - 1)
