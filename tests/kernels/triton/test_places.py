"""Which program has which rows, and where in memory a head's are, at every small size.

The functions of the kernels run as Python on whole numbers. What they are held against is torch's
own: the order of `itertools.product`, and where a view of a tensor begins.
"""

import itertools
from types import FunctionType, SimpleNamespace

import pytest
import torch

from attention_kernels.triton import fast, tiles
from attention_kernels.triton.runtime import blocks_of

SMALL = range(1, 5)


def as_python(function, **names):
    """A function of the kernels on whole numbers, with other things for what it calls."""
    names = {"widen_index": int, "whole": int} | names
    return FunctionType(function.fn.__code__, names, function.__name__)


def programs(function, count, *arguments, **names):
    """What a function of the kernels gives in each of so many programs."""
    given = []
    for program in range(count):
        tl = SimpleNamespace(program_id=lambda axis, program=program: program)
        place = as_python(tiles.place, tl=tl)
        given.append(as_python(function, tl=tl, place=place)(*arguments))
    return given


@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_each_block_of_each_head_is_one_programs(block):
    for length, heads, batches in itertools.product(range(1, 20), SMALL, SMALL):
        starts = range(0, length, block)
        count = blocks_of(length, block) * heads * batches
        every = itertools.product(range(batches), range(heads), starts)
        expected = [(start, head, batch) for batch, head, start in every]
        assert programs(tiles.place, count, length, heads, block) == expected


@pytest.mark.parametrize("has_right", [False, True])
@pytest.mark.parametrize("block", [1, 2, 3, 16])
def test_queries_with_most_keys_to_see_come_first(block, has_right):
    N = SimpleNamespace(block_q=block, has_right=has_right)
    for length, heads, batches in itertools.product(range(1, 20), SMALL, SMALL):
        starts = range(0, length, block)
        count = len(starts) * heads * batches
        order = starts[::-1] if has_right else starts
        every = itertools.product(range(batches), range(heads), order)
        expected = [(start, head, batch) for batch, head, start in every]
        assert programs(fast._place_queries, count, length, heads, N) == expected


def tensors(rows=5, dim=2):
    """Tensors `(batch, heads, rows, dim)`, some of them views of others; strides differ in each."""
    for batches, heads in itertools.product(SMALL, SMALL):
        yield torch.empty(batches, heads, rows, dim)
        yield torch.empty(batches, rows, heads, dim).transpose(1, 2)
        yield torch.empty(heads, batches, rows + 3, dim).transpose(0, 1)[:, :, 2:-1]
        yield torch.empty(1, 1, rows, dim).expand(batches, heads, rows, dim)


def test_a_head_is_where_its_view_begins():
    at_head, N = as_python(tiles.at_head), SimpleNamespace(packed=False)
    for x in tensors():
        for batch, head in itertools.product(range(x.shape[0]), range(x.shape[1])):
            at = at_head(x.storage_offset(), x.stride(), batch, head, 0, N)
            assert at == x[batch, head].storage_offset()


def test_a_packed_sequence_is_where_its_rows_begin():
    at_head, N = as_python(tiles.at_head), SimpleNamespace(packed=True)
    for x in tensors():
        for sequence, head, first in itertools.product(SMALL, range(x.shape[1]), range(5)):
            at = at_head(x.storage_offset(), x.stride(), sequence, head, first, N)
            assert at == x[0, head, first:].storage_offset()


def test_a_part_is_where_its_rows_begin():
    at_part, at_part_row = as_python(tiles.at_part), as_python(tiles.at_part_row)
    for x in tensors():
        lse = torch.empty(x.shape[:3])
        for part, head, first in itertools.product(*map(range, x.shape[:3])):
            at = at_part(x.storage_offset(), x.stride(), part, head, first)
            assert at == x[part, head, first:].storage_offset()
            at = at_part_row(0, part, head, x.shape[1], x.shape[2], first)
            assert at == lse[part, head, first:].storage_offset()


@pytest.mark.parametrize("packed", [False, True])
def test_a_row_of_numbers_is_where_its_view_begins(packed):
    at_row, N = as_python(tiles.at_row), SimpleNamespace(packed=packed)
    for batches, heads, rows in itertools.product(SMALL, SMALL, SMALL):
        x = torch.empty(batches, heads, rows)
        for batch, head, first in itertools.product(range(batches), range(heads), range(rows)):
            view = x[0, head, first:] if packed else x[batch, head]
            at = at_row(0, batch, head, heads, rows, first if packed else 0, N)
            assert at == view.storage_offset()


def test_heads_are_numbered_along_the_batch():
    head_number, N = as_python(tiles.head_number), SimpleNamespace(rounding="nearest_even")
    for batches, heads in itertools.product(SMALL, SMALL):
        every = itertools.product(range(batches), range(heads))
        found = [head_number(None, batch, head, heads, 1, N) for batch, head in every]
        assert found == [(0, n) for n in range(batches * heads)]


@pytest.mark.parametrize("group", [1, 2, 3])
def test_heads_of_several_ranks_are_numbered_as_those_of_one(group):
    """A rank has some of the sequences and of the kv heads, each of a group of query heads."""
    head_number, N = as_python(tiles.head_number), SimpleNamespace(rounding="stochastic")
    for batches, heads in itertools.product(SMALL, SMALL):
        number = torch.arange(batches * heads).view(batches, heads).tolist()
        for first, begin in itertools.product(range(batches), range(heads)):
            place = {"first_batch": first, "first_head": begin * group, "heads": heads * group}
            masks = SimpleNamespace(scalars=SimpleNamespace(rounding=77, **place))
            for batch, head in itertools.product(range(batches - first), range(heads - begin)):
                n = head_number(masks, batch, head, heads - begin, group, N)
                assert n == (77, number[first + batch][begin + head])
