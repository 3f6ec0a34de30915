"""Drift over ranks is that of the whole to the bit, whatever is where, and no rank goes astray."""

import math
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.collectives import OneProcess
from stability.metrics.drift import drift
from stability.metrics.pieces import pieces_of
from stability.metrics.sharded_drift import drift_of_pieces, sharded_drift
from tests.stability.metrics.simulated_ranks import cut, on_ranks

FORMATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.float8_e5m2]


@st.composite
def states(draw):
    """Two states of one to four tensors, what of them is equal or no number, and whose it is."""
    seed = draw(st.integers(0, 2**16))
    generator = torch.Generator().manual_seed(seed)
    count = draw(st.integers(1, 5))
    a, b, owners = {}, {}, {}
    for name in "wxyz"[: draw(st.integers(1, 4))]:
        shape = (draw(st.integers(1, 12)), *draw(st.sampled_from([(), (1,), (7,), (2, 3)])))
        spread = draw(st.sampled_from([1e-3, 1.0, 1e20]))
        y = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        x = y + draw(st.sampled_from([0.0, 1e-6, 1.0])) * torch.randn(y.shape, generator=generator)
        for values in (x, y):
            for _ in range(draw(st.integers(0, 3))):
                at = draw(st.integers(0, y.numel() - 1))
                values.view(-1)[at:] = draw(st.sampled_from([0.0, -0.0, 1.0, 1e-42, -3.0, *RARE]))
        formats = draw(st.sampled_from(FORMATS)), draw(st.sampled_from(FORMATS))
        a[name], b[name] = x.to(formats[0]), y.to(formats[draw(st.integers(0, 1))])
        rows = draw(st.permutations(range(shape[0])))
        owners[name] = [(row, draw(st.integers(0, count - 1))) for row in rows]
    return a, b, owners, count


RARE = [math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("examples", [10, pytest.param(300, marks=pytest.mark.long)])
def test_any_shards_have_the_drift_of_the_whole_to_the_bit(examples):
    pairs = given(states(), st.sampled_from([1, 3, 20, 10**6]), st.sampled_from([2, 2**18]))
    settings(max_examples=examples)(pairs(_shards_and_the_whole))()


def _shards_and_the_whole(pair, held, few):
    a, b, owners, count = pair
    expected = drift(a, b)

    def measure(rank):
        pieces = (cut(state, owners, rank.index) for state in (a, b))
        return drift_of_pieces(*pieces, ranks=rank, held=held)

    module = "stability.metrics.sharded_wasserstein"
    with mock.patch.multiple(module, _FEW=few, _AT_ONCE=2, _CHUNK={"cpu": 5}):
        for found in on_ranks(count, measure):
            assert repr(found) == repr(expected)  # a NaN is unequal to itself
        alone = drift_of_pieces(pieces_of(a), pieces_of(b), ranks=OneProcess(), held=held)
    assert repr(alone) == repr(expected)


def test_values_of_a_model_are_exchanged_in_bounded_rounds():
    generator = torch.Generator().manual_seed(0)
    b = {f"h.{i}": 0.02 * torch.randn(60, 50, generator=generator) for i in range(8)}
    b |= {"gain": torch.ones(500), "bias": torch.zeros(400)}
    a = {name: x + 1e-4 * torch.randn(x.shape, generator=generator) for name, x in b.items()}
    owners = {name: [(row, row * 4 // len(x)) for row in range(len(x))] for name, x in b.items()}
    expected = drift(a, b)
    sizes = []

    def measure(rank):
        really = rank.exchange

        def exchange(values, sent, received):
            if values.is_floating_point():
                sizes.append(sum(received))
            return really(values, sent, received)

        rank.exchange = exchange
        pieces = (cut(state, owners, rank.index) for state in (a, b))
        return drift_of_pieces(*pieces, ranks=rank, held=3000)

    assert all(found == expected for found in on_ranks(4, measure))
    # the ones and zeros of b, too many for their share of a rank, are counted and not sent
    assert max(sizes) <= 3000
    assert len(sizes) < 4 * 2 * 2 * 2 * 24_900 / (4 * 3000)
    assert min(sizes[:4]) > 1000


def test_all_ranks_raise_what_one_of_them_finds():
    whole = {"w": torch.arange(12.0).reshape(4, 3)}
    owners = {"w": [(0, 0), (1, 0), (2, 1), (3, 1)]}
    others = {"w": [(0, 0), (1, 0), (3, 1), (2, 1)]}

    def measure(rank):
        a, b = cut(whole, owners, rank.index), cut(whole, others, rank.index)
        return drift_of_pieces(a, b, ranks=rank)

    found = on_ranks(2, measure)
    assert [type(error) for error in found] == [ValueError] * 2
    assert str(found[0]) == str(found[1])
    assert "w must be laid out alike in both states, got (2, 3) and (2, 3)" in str(found[0])
    assert "a.redistribute(" in str(found[0])


def test_ranks_that_name_other_tensors_are_refused():
    def measure(rank):
        state = pieces_of({"w" if rank.index else "v": torch.ones(2)})
        return drift_of_pieces(state, state, ranks=rank)

    for error in on_ranks(3, measure):
        with pytest.raises(ValueError, match="all ranks must name the same tensors"):
            raise error


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "only in state_a: x; only in state_b: y"),
        ({"x": torch.ones(0)}, {"x": torch.ones(0)}, r"hold values, got x \(0,\)"),
        ({"x": torch.ones(2)}, {"x": torch.ones(3)}, r"one shape .* got x \(2,\) and \(3,\)"),
        ({"x": torch.ones(2).int()}, {"x": torch.ones(2)}, "x must be floating-point, got .*int32"),
    ],
)
def test_what_can_not_be_compared_is_named(a, b, message):
    with pytest.raises(ValueError, match=message):
        sharded_drift(a, b)


def test_one_process_has_the_drift_of_its_states():
    generator = torch.Generator().manual_seed(0)
    b = {"w": torch.randn(50, 3, generator=generator), "number": torch.tensor(1.5)}
    a = {name: x + 0.1 for name, x in b.items()}
    assert sharded_drift(a, b) == drift(a, b)
    assert sharded_drift(b, {name: x.clone() for name, x in b.items()}) == drift(b, b)
