"""Numbers by place: the laws they follow, the bits they are, and the same ones in any part."""

import math
from functools import partial
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from stability.metrics import mixing
from stability.metrics.mixing import key_of
from stability.model import index_stream
from stability.model.index_stream import fill_by_place, normal_at, sign_at, uniform_at
from stability.recorder.inside import mixing as mixing_inside

WORD = 2**64 - 1
DRAWS = {"uniform": uniform_at, "normal": normal_at, "sign": sign_at}
EXACT = NormalDist()


def _word(key: int, place: int) -> int:
    """SplitMix64 as it is written, in Python's integers."""
    z = (key + (place + 1) * 0x9E3779B97F4A7C15) & WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & WORD
    return z ^ (z >> 31)


def test_the_words_are_those_of_splitmix64():
    # what the reference implementation gives from seed 1234567, as its authors' users check it
    known = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert [_word(1234567, place) for place in range(3)] == known


@given(st.integers(0, WORD), st.lists(st.integers(0, 2**48), min_size=1, max_size=8))
def test_every_draw_is_of_the_word_at_its_place(key, places):
    at = torch.tensor(places)
    words = [_word(key, place) for place in places]
    # an odd multiple of 2^-53 by the 52 upper bits
    assert uniform_at(key, at).tolist() == [(2 * (word >> 12) + 1) / 2**53 for word in words]
    assert sign_at(key, at).tolist() == [2 * (word >> 63) - 1 for word in words]
    wanted = [EXACT.inv_cdf((2 * (word >> 12) + 1) / 2**53) for word in words]
    assert normal_at(key, at).tolist() == pytest.approx(wanted, rel=4e-15)


@given(
    st.sampled_from(sorted(DRAWS)),
    st.integers(0, WORD),
    st.lists(st.integers(1, 40), min_size=1, max_size=3),
    st.randoms(use_true_random=False),
)
def test_parts_are_the_bits_of_the_whole(draw, key, shape, random):
    """Whoever holds which places, in whatever order, as random shards of a tensor do."""
    at = partial(DRAWS[draw], key)
    whole = fill_by_place(torch.empty(shape, dtype=torch.float64), at).view(-1)
    places = list(range(whole.numel()))
    random.shuffle(places)
    cuts = sorted(random.randrange(len(places) + 1) for _ in range(3))
    for start, end in zip([0, *cuts], [*cuts, len(places)], strict=True):
        held = torch.tensor(places[start:end], dtype=torch.int64)
        assert torch.equal(whole[held], at(held).double())


def test_a_portion_s_end_leaves_no_place_out():
    count = 2 * index_stream._PORTION + 3
    whole = fill_by_place(torch.empty(count, dtype=torch.float64), partial(uniform_at, 5))
    assert torch.equal(whole, uniform_at(5, torch.arange(count)))


EDGES = [2.0**-53, 2.0**-30, math.exp(-25), 0.074999, 0.075, 0.0750001, 0.3, 0.5 - 2.0**-53]


def test_normal_numbers_are_as_far_out_as_the_distribution_says():
    edges = [*EDGES, *(1 - p for p in EDGES), 0.5 + 2.0**-53]
    edges += [p * (1 + step) for p in EDGES[1:-1] for step in (-1e-9, 1e-9)]
    found = index_stream._normal_quantile(torch.tensor(edges, dtype=torch.float64))
    assert found.tolist() == pytest.approx([EXACT.inv_cdf(p) for p in edges], rel=2e-15)
    assert index_stream._normal_quantile(torch.tensor([0.5], dtype=torch.float64)).item() == 0


@given(st.floats(2.0**-53, 1.0, exclude_max=True))
def test_the_logarithm_of_the_tails_is_the_logarithm(x):
    found = index_stream._log(torch.tensor([x], dtype=torch.float64)).item()
    assert found == pytest.approx(math.log(x), rel=4e-16, abs=2e-16)


def test_the_laws():
    """Moments over 4 million draws, and their correlation with the neighbour: five s.e. each."""
    count = 2**22
    z = fill_by_place(torch.empty(count, dtype=torch.float64), partial(normal_at, key_of("z")))
    for power, mean, variance in [(1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)]:
        off = (z**power).mean().item() - mean
        assert abs(off) < 5 * math.sqrt(variance / count), power
    assert abs((z[1:] * z[:-1]).mean().item()) < 5 / math.sqrt(count)
    signs = fill_by_place(torch.empty(count, dtype=torch.float64), partial(sign_at, key_of("s")))
    assert abs(signs.mean().item()) < 5 / math.sqrt(count)


def test_two_keys_have_nothing_in_common():
    places = torch.arange(2**16)
    first, second = (normal_at(key_of("init", seed, "w"), places) for seed in (0, 1))
    assert abs((first * second).mean().item()) < 5 / 2**8


@given(
    st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1),
    st.lists(st.text(max_size=8), max_size=3),
)
def test_the_recorder_s_mixer_gives_the_same_bits(words, parts):
    words = torch.tensor(words)
    assert torch.equal(mixing_inside.mixed(words), mixing.mixed(words))
    assert mixing_inside.key_of(*parts) == mixing.signed64(mixing.key_of(*parts))
    assert mixing.signed64(mixing.GOLDEN) == mixing_inside.GOLDEN
