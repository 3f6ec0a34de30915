"""The masks against their definition, element by element."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.masks import Mask

CPU = torch.device("cpu")
SIDES = st.none() | st.integers(0, 14)


@st.composite
def problems(draw):
    """A mask, lengths up to 10, and a tile of them that is not empty."""
    query_len, key_len = draw(st.integers(1, 10)), draw(st.integers(1, 10))
    seeded = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    full = (2, 3, query_len, key_len)

    def some(chance, shape):
        return torch.rand(shape, generator=seeded) < chance

    def broadcastable():
        return tuple(size if draw(st.booleans()) else 1 for size in full)

    tensors = {}
    if draw(st.booleans()):
        tensors["key_padding"] = some(0.7, (2, key_len))
    if draw(st.booleans()):
        tensors["visible"] = some(0.7, broadcastable())
    if draw(st.booleans()):
        tensors["bias"] = torch.randn(broadcastable(), generator=seeded)
    if draw(st.booleans()):
        batch = draw(st.sampled_from((1, 2)))
        tensors["alibi_slopes"] = torch.rand((batch, 3), generator=seeded)
    mask = Mask(causal=draw(st.booleans()), window=(draw(SIDES), draw(SIDES)), **tensors)
    rows = range(draw(st.integers(0, query_len - 1)), query_len)
    keys = range(draw(st.integers(0, key_len - 1)), key_len)
    rows = rows[: draw(st.integers(1, len(rows)))]
    keys = keys[: draw(st.integers(1, len(keys)))]
    return mask, query_len, key_len, rows, keys


def in_reach(mask, i, j, query_len, key_len):
    """Flash-attn's rule: i + K - Q - left <= j <= i + K - Q + right, causal right = 0."""
    stands = i + key_len - query_len
    left, right = mask.window
    if mask.causal and j > stands:
        return False
    return (left is None or j >= stands - left) and (right is None or j <= stands + right)


def at(x, *place):
    """Element of a tensor that broadcasts."""
    return x[tuple(0 if size == 1 else p for p, size in zip(place, x.shape, strict=True))]


@settings(max_examples=150)
@given(problems())
def test_the_key_range_holds_exactly_the_keys_in_reach_of_any_row(problem):
    mask, query_len, key_len, rows, _ = problem
    expected = [
        j for j in range(key_len) if any(in_reach(mask, i, j, query_len, key_len) for i in rows)
    ]
    found = mask.key_range(rows, query_len, key_len)
    assert list(found) == expected
    assert 0 <= found.start <= found.stop <= key_len


@settings(max_examples=150)
@given(problems())
def test_every_tile_hides_what_its_definition_hides(problem):
    mask, query_len, key_len, rows, keys = problem
    hidden = mask.hidden(rows, keys, query_len, key_len, CPU)
    if hidden is None:
        hidden = torch.zeros((), dtype=torch.bool)
    hidden = hidden.expand(2, 3, len(rows), len(keys))
    for b in range(2):
        for h in range(3):
            for i in rows:
                for j in keys:
                    may = in_reach(mask, i, j, query_len, key_len)
                    if mask.key_padding is not None:
                        may = may and bool(mask.key_padding[b, j])
                    if mask.visible is not None:
                        may = may and bool(at(mask.visible, b, h, i, j))
                    assert hidden[b, h, i - rows.start, j - keys.start] != may


@settings(max_examples=100)
@given(problems())
def test_every_tile_adds_the_bias_and_the_slope_times_the_distance(problem):
    mask, query_len, key_len, rows, keys = problem
    added = mask.added(rows, keys, query_len, key_len, torch.float64, CPU)
    assert (added is None) == (mask.bias is None and mask.alibi_slopes is None)
    if added is None:
        return
    added = added.expand(2, 3, len(rows), len(keys))
    for b in range(2):
        for h in range(3):
            for i in rows:
                for j in keys:
                    expected = 0.0
                    if mask.bias is not None:
                        expected += at(mask.bias, b, h, i, j).item()
                    if mask.alibi_slopes is not None:
                        distance = abs(i + key_len - query_len - j)
                        expected -= at(mask.alibi_slopes, b, h).item() * distance
                    assert added[b, h, i - rows.start, j - keys.start].item() == expected


def test_what_is_added_is_in_the_dtype_that_is_asked_for():
    bias = torch.full((1, 1, 1, 1), 1 + 2**-40, dtype=torch.float64)
    mask = Mask(bias=bias, alibi_slopes=torch.ones(1, 1))
    assert mask.added(range(1), range(1), 1, 1, torch.float64, CPU).item() == 1 + 2**-40
    narrow = mask.added(range(1), range(1), 1, 1, torch.float32, CPU)
    assert (narrow.dtype, narrow.item()) == (torch.float32, 1.0)


def test_a_tile_that_positions_leave_whole_costs_no_tensor():
    mask = Mask(causal=True, window=(7, None))
    assert mask.hidden(range(4, 8), range(0, 5), 8, 8, CPU) is None
    assert mask.hidden(range(4, 8), range(0, 6), 8, 8, CPU) is not None


LENGTHS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=1, max_size=5)


@settings(max_examples=100)
@given(LENGTHS, st.booleans())
def test_packed_sequences_are_those_with_queries_and_keys_each_with_its_slopes(lengths, shared):
    offsets = torch.tensor([(0, 0), *lengths]).cumsum(0).to(torch.int32)
    slopes = torch.arange(float(len(lengths))).unsqueeze(1).expand(-1, 2)
    mask = Mask(
        causal=True,
        cu_seqlens_q=offsets[:, 0],
        cu_seqlens_k=offsets[:, 1],
        alibi_slopes=slopes[-1:] if shared else slopes,
    )
    expected = [n for n, (queries, keys) in enumerate(lengths) if queries and keys]
    total_q, total_k = offsets[-1].tolist()
    sequences = list(mask.sequences(total_q, total_k))
    assert [sequence.index for sequence in sequences] == expected
    for sequence in sequences:
        start_q, start_k = offsets[sequence.index].tolist()
        queries, keys = lengths[sequence.index]
        assert sequence.queries == range(start_q, start_q + queries)
        assert sequence.keys == range(start_k, start_k + keys)
        assert sequence.mask.causal
        assert sequence.mask.cu_seqlens_q is None
        whose = len(lengths) - 1 if shared else sequence.index
        assert sequence.mask.alibi_slopes.tolist() == [[whose, whose]]


def test_a_batch_that_is_not_packed_is_one_sequence():
    mask = Mask(window=(3, None))
    (sequence,) = mask.sequences(5, 9)
    assert (sequence.queries, sequence.keys) == (range(5), range(9))
    assert sequence.mask is mask
