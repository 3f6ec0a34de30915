"""Which weights dropout keeps: a function of seed, offset and place alone, and an even one."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import dropout_keep_mask, flash_attention
from attention_kernels.dropout import dropped_below
from attention_kernels.masks import Mask
from attention_kernels.points import DROPOUT_STREAM, POINTS
from attention_kernels.random_bits import bits_at
from tests.kernels.dropout_stream import keep_by_hand, words_by_hand

SIZES = (3, 4, 96, 128)
SIGMAS = 5.0
"""Of 6e-7 of normal numbers is the magnitude larger."""


def keep(sizes, p=0.3, seed=7, offset=0):
    return dropout_keep_mask(
        *sizes, dropout_p=p, dropout_seed=seed, dropout_offset=offset, device="cpu"
    )


def test_the_stream_is_known():
    """Another one would drop other weights in every run that has been recorded."""
    rows = keep((1, 2, 2, 16), 0.5, seed=2**35 + 9, offset=4)[0].flatten(0, 1)
    assert ["".join("01"[x] for x in row.tolist()) for row in rows] == [
        "0010111001101000",
        "1001001001010101",
        "1001110010011010",
        "0101010010111100",
    ]


@pytest.mark.parametrize("p", [2.0**-32, 0.1, 0.5, 0.9, 1 - 2.0**-32])
@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32, 2**63 - 1])
def test_the_mask_is_the_one_computed_by_hand(p, seed):
    for offset in (0, 5, 2**32 + 5):
        expected = keep_by_hand((2, 3, 5, 33), p, seed, offset)
        assert torch.equal(keep((2, 3, 5, 33), p, seed, offset), expected)


@settings(max_examples=40)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (3, 5, 40, 70))),
    p=st.floats(0.0, 1 - 2.0**-32),
    seed=st.integers(0, 2**63 - 1),
    offset=st.integers(0, 2**63 - 1),
)
def test_of_any_shape_and_seed_it_is_the_one_by_hand(sizes, p, seed, offset):
    assert torch.equal(keep(sizes, p, seed, offset), keep_by_hand(sizes, p, seed, offset))


def test_a_smaller_call_drops_as_a_larger_one():
    whole = keep(SIZES)
    assert torch.equal(keep((2, 3, 50, 60)), whole[:2, :3, :50, :60])
    assert torch.equal(keep((1, 1, 1, 1)), whole[:1, :1, :1, :1])


def test_a_part_of_a_call_drops_as_the_whole():
    """Golden attends some batches and heads at a time, in chunks of rows."""
    mask = Mask(dropout_p=0.3, dropout_seed=7)
    part = mask.part(slice(1, 3), slice(2, 3)).part(slice(1, 2), slice(0, 1))
    kept = part.kept(range(10, 30), range(64, 128), 1, 1, torch.device("cpu"))
    assert torch.equal(kept, keep(SIZES)[2:3, 2:3, 10:30, 64:])


def test_without_dropout_every_weight_is_kept_and_no_bits_are_drawn():
    assert keep((2, 1, 3, 4), p=0.0).all()
    mask = Mask(dropout_p=0.0, dropout_seed=7)
    assert mask.kept(range(3), range(4), 2, 1, torch.device("cpu")) is None
    assert mask.kept_scale() == 1.0


@pytest.mark.parametrize(
    ("p", "below"), [(2.0**-33, 0), (2.0**-32, 1), (0.25, 2**30), (0.1, 429496730)]
)
def test_p_is_kept_to_half_of_a_word(p, below):
    assert dropped_below(p) == below


@pytest.mark.parametrize("engine", ["twin", "triton"])
def test_a_weight_is_dropped_from_the_first_p_above_its_own_word(engine):
    word = int(words_by_hand((1, 1, 1, 1), 7).item())
    q = torch.ones(1, 1, 1, 16)
    for below, dropped in ((word, False), (word + 1, True)):
        p = below / 2**32
        assert bool(keep((1, 1, 1, 1), p)) != dropped
        out = flash_attention(q, q, q, engine=engine, dropout_p=p, dropout_seed=7)
        assert bool((out == 0).all()) == dropped


@pytest.mark.parametrize("p", [0.01, 0.1, 0.5, 0.9, 0.999])
def test_the_rate_is_p_over_all_and_along_each_axis(p):
    dropped = (~keep(SIZES, p)).double()
    for axes in (*itertools.combinations(range(4), 3), (0, 1, 2, 3)):
        mean = dropped.mean(axes)
        count = dropped.numel() / mean.numel()
        assert (mean - p).abs().max() <= SIGMAS * math.sqrt(p * (1 - p) / count), axes


def assert_unrelated(one, other):
    """Correlation of two bool tensors, of n places, within SIGMAS / sqrt(n)."""
    one, other = (x.double().flatten() for x in (one, other))
    r = torch.corrcoef(torch.stack([one, other]))[0, 1]
    assert abs(r) <= SIGMAS / math.sqrt(one.numel())


@pytest.mark.parametrize("p", [0.1, 0.5])
@pytest.mark.parametrize("axis", range(4), ids=["batches", "heads", "queries", "keys"])
def test_neighbours_are_unrelated(p, axis):
    kept = keep(SIZES, p)
    for apart in (1, 2):
        size = kept.shape[axis] - apart
        assert_unrelated(kept.narrow(axis, 0, size), kept.narrow(axis, apart, size))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_neighbouring_seeds_and_offsets_are_unrelated(p):
    first = keep(SIZES, p, seed=7, offset=3)
    others = [(8, 3), (7 + 2**32, 3), (7, 4), (7, 3 + 2**32), (3, 7), (6, 3), (7, 2)]
    for seed, offset in others:
        assert_unrelated(first, keep(SIZES, p, seed, offset))


def test_keys_and_queries_are_not_alike():
    kept = keep((1, 4, 128, 128), 0.5).triu(1)
    upper = torch.ones(128, 128).triu(1) > 0
    assert_unrelated(kept[..., upper], keep((1, 4, 128, 128), 0.5).mT[..., upper])


@pytest.mark.parametrize("step", [0, 64])
def test_stochastic_rounding_draws_other_bits_at_the_same_seed(step):
    assert DROPOUT_STREAM not in {point.stream for point in POINTS.values()}
    heads, rows, keys = SIZES[1:]
    at = torch.arange(heads)[:, None, None], torch.arange(rows)[:, None], torch.arange(keys)
    ours = torch.from_numpy(words_by_hand((1, heads, rows, keys), 7).astype("int64"))[0]
    for point in POINTS.values():
        words = bits_at(7, point.stream, step, *at)
        assert_unrelated(ours >= 2**31, words >= 2**31)


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        ((0, 1, 1, 1), {}, "dropout_keep_mask: batch must be at least 1, got 0; give the sizes of"),
        ((1, 1, 1, 0), {}, "dropout_keep_mask: key_len must be at least 1, got 0; give the sizes"),
        ((1, 1, 1, 1), {"p": 1.0}, "dropout_keep_mask: dropout_p must be a number of at least 0"),
        ((1, 1, 1, 1), {"seed": -1}, "dropout_keep_mask: dropout_seed must be an integer from 0"),
    ],
)
def test_what_no_call_takes_is_refused(sizes, options, message):
    with pytest.raises(ValueError, match=message):
        keep(sizes, **options)


def test_no_generator_is_read_or_advanced():
    q = torch.ones(1, 1, 4, 16)
    outs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        outs.append(flash_attention(q, q, q, dropout_p=0.5, dropout_seed=3))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(*outs)
    assert 0 < outs[0].unique().numel() <= 5  # 0 to 4 of the keys are kept, each 1/2
