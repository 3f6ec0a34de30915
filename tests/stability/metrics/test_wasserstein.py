"""W1 is scipy's, keeps the laws of a distance, and is one number however the values are held."""

import itertools
import math
import sys
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy.stats import wasserstein_distance

from stability.metrics.wasserstein import (
    cut_into_ranges,
    gather,
    pooled_wasserstein,
    walk,
    wasserstein_1d,
)

VALUES = st.floats(-1e6, 1e6, width=32) | st.sampled_from([0.0, 1.0, -1.0])
SAMPLES = hnp.arrays(np.float32, st.integers(1, 40), elements=VALUES)
PAIRS = st.integers(1, 40).flatmap(
    lambda n: st.tuples(*[hnp.arrays(np.float32, n, elements=VALUES)] * 2)
)
modest = settings(max_examples=200)


@modest
@given(SAMPLES, SAMPLES)
def test_w1_is_scipys_for_any_sizes(a, b):
    scale = float(max(np.abs(a).max(), np.abs(b).max(), 1e-30))
    expected = wasserstein_distance(a, b)
    found = wasserstein_1d(torch.from_numpy(a), torch.from_numpy(b))
    assert found == pytest.approx(expected, rel=1e-9, abs=1e-13 * scale)


@modest
@given(PAIRS, st.randoms(use_true_random=False))
def test_w1_is_blind_to_position_and_at_most_the_mean_difference(pair, random):
    a, b = (torch.from_numpy(x) for x in pair)
    order = list(range(len(a)))
    random.shuffle(order)
    assert wasserstein_1d(a[order], b) == wasserstein_1d(a, b) == wasserstein_1d(b, a)
    assert wasserstein_1d(a, a[order]) == 0.0
    mean_abs = float((a.double() - b.double()).abs().mean())
    assert wasserstein_1d(a, b) <= mean_abs * (1 + 1e-12)


def test_w1_of_a_shift_is_the_shift():
    a = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert wasserstein_1d(a, a + 0.25) == pytest.approx(0.25, rel=1e-13)


def test_w1_keeps_differences_of_one_ulp_among_a_million_values():
    a = torch.ones(2**20 + 3)
    b = torch.nextafter(a, torch.tensor(2.0))
    assert wasserstein_1d(a, b) == 2.0**-23


def test_w1_of_fp64_sees_what_fp32_cannot():
    a = torch.ones(5, dtype=torch.float64)
    assert wasserstein_1d(a, a + 1e-12) == pytest.approx(1e-12, rel=1e-3)


def test_inputs_are_unchanged_whatever_their_layout():
    a = torch.arange(12.0).flip(0).reshape(3, 4).mT
    before = a.clone()
    wasserstein_1d(a, a + 1)
    assert torch.equal(a, before)


def test_nan_gives_nan_and_infinity_stays_infinite():
    a, nan, inf = torch.zeros(3), torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0, 1, math.inf])
    assert math.isnan(wasserstein_1d(a, nan))
    assert math.isnan(wasserstein_1d(nan, a[:2]))
    assert wasserstein_1d(a, inf) == wasserstein_1d(a, inf[:2].repeat(2) + inf[2]) == math.inf


def test_empty_is_refused():
    with pytest.raises(ValueError, match="a and b must hold values, got 0 and 3"):
        wasserstein_1d(torch.empty(0), torch.zeros(3))


def test_infinite_values_of_one_sign_match_each_other():
    a = torch.tensor([math.inf, 0.0, -math.inf])
    assert wasserstein_1d(a, a) == 0.0
    assert wasserstein_1d(a, torch.tensor([-math.inf, math.inf, 3.0])) == 1.0
    assert wasserstein_1d(a, a.repeat(2)) == 0.0


@pytest.mark.parametrize(("n", "m"), [(100_003, 100_003), (100_003, 70_001), (65_536, 32_768)])
def test_w1_of_many_values_is_scipys(n, m):
    generator = torch.Generator().manual_seed(n + m)
    a = torch.randn(n, generator=generator)
    b = torch.randn(m, generator=generator).round(decimals=1) * 1e30
    for x, y in ((a, b), (1e30 * a, b)):
        expected = wasserstein_distance(x.numpy(), y.numpy())
        assert wasserstein_1d(x, y) == pytest.approx(expected, rel=1e-10)


def test_narrow_formats_are_taken_at_their_exact_values():
    a = torch.tensor([1.0, 3.0]).bfloat16()
    b = torch.tensor([1.0, 3.0 + 2.0**-30], dtype=torch.float64)
    assert wasserstein_1d(a, b) == 2.0**-31


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"must be floating-point, got torch.int64; convert"):
        wasserstein_1d(torch.zeros(2), torch.zeros(2, dtype=torch.int64))


FORMATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1e-40, -1e-40, 65504.0, 2.0**-24])
NUMBERS = st.floats(-6e4, 6e4) | SPECIAL
ANY = NUMBERS | st.sampled_from([math.nan, math.inf, -math.inf])


def _pairs(elements):
    """Two samples of one size, each cut at its own place into two tensors, and their formats."""
    sizes = st.integers(1, 40)
    samples = sizes.flatmap(
        lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=elements)] * 2)
    )
    return st.tuples(samples, st.integers(0, 40), st.tuples(*[st.sampled_from(FORMATS)] * 2))


def _sides(pair):
    samples, cut, formats = pair
    return [
        [part.to(format) for part in torch.from_numpy(sample).tensor_split([cut])]
        for sample, format in zip(samples, formats, strict=True)
    ]


def _pooled(parts):
    return torch.cat([part.double().flatten() for part in parts])


many = settings(max_examples=300)


@many
@given(_pairs(NUMBERS), st.integers(1, 30))
def test_walking_in_ranges_gives_what_memory_and_scipy_give(pair, held):
    a, b = _sides(pair)
    found = pooled_wasserstein(a, b, held=held)
    # ours carry some ULPs of the terms and their sum, scipy some of the values themselves
    x, y = _pooled(a), _pooled(b)
    assert found == pytest.approx(wasserstein_1d(x, y), rel=1e-13, abs=0)
    scale = float(max(x.abs().max(), y.abs().max()))
    assert found == pytest.approx(wasserstein_distance(x, y), rel=1e-12, abs=1e-14 * scale)


@many
@given(_pairs(ANY), st.integers(1, 30))
def test_nan_and_infinities_count_as_in_memory(pair, held):
    a, b = _sides(pair)
    expected = wasserstein_1d(_pooled(a), _pooled(b))
    assert pooled_wasserstein(a, b, held=held) == pytest.approx(expected, rel=1e-13, nan_ok=True)


@pytest.mark.parametrize("format", FORMATS, ids=str)
def test_the_two_zeros_are_no_distance_apart_in_any_range(format):
    a = [torch.tensor([0.0, -0.0, 1.0, -1.0]).to(format)]
    b = [torch.tensor([-0.0, -0.0, 1.0, -1.0]).to(format)]
    assert pooled_wasserstein(a, b, held=1) == 0.0
    assert math.copysign(1, b[0][0]) == -1, "inputs are unchanged"


def _real(count, seed, format):
    generator = torch.Generator().manual_seed(seed)
    parts = [0.02 * torch.randn(count, generator=generator, dtype=torch.float64) for _ in range(3)]
    ties = [torch.zeros(count, dtype=torch.float64), torch.full((7, count // 7), 0.02).double()]
    return [part.to(format) for part in (*parts, *ties)]


@pytest.mark.parametrize("format", FORMATS, ids=str)
@pytest.mark.parametrize("shift", [0.0, 1e-6, 0.3])
def test_a_model_with_massive_ties_is_measured_alike_at_any_bound(format, shift):
    a = [(part.double() + shift).to(format) for part in _real(3003, 0, format)]
    b = _real(3003, 1, format)
    expected = wasserstein_1d(_pooled(a), _pooled(b))
    for held in (50, 1000, 20_000):
        assert pooled_wasserstein(a, b, held=held) == pytest.approx(expected, rel=1e-13)


@pytest.mark.parametrize("format", [torch.float32, torch.float64], ids=str)
def test_no_more_values_are_held_than_allowed(format):
    a, b = _real(3003, 0, format), _real(3003, 1, format)
    module = sys.modules["stability.metrics.wasserstein"]
    really_gather = module.gather
    held = []

    def gather(parts, within, side):
        held.append(sum(within.counts))
        return really_gather(parts, within, side)

    with mock.patch.object(module, "gather", gather):
        pooled_wasserstein(a, b, held=900)
    assert max(held) <= 900
    # 3 x 3003 x 2 values of no tie in ranges of at most 900, each seen from both sides
    assert len(held) < 2 * 2 * 3 * 3003 * 2 / 900


def test_values_are_walked_in_pieces_of_any_length():
    a, b = _real(210, 0, torch.float32), _real(210, 1, torch.float32)
    expected = wasserstein_1d(_pooled(a), _pooled(b))
    for piece in (1, 64, 211):
        with mock.patch.multiple("stability.metrics.wasserstein", _PIECE=piece, _CHUNK=piece):
            assert pooled_wasserstein(a, b, held=100) == pytest.approx(expected, rel=1e-13)


def test_a_difference_of_one_ulp_is_found_in_any_range():
    b = torch.linspace(-3, 3, 5001)
    a = torch.nextafter(b, torch.tensor(torch.inf))
    expected = float((a.double() - b.double()).mean())
    assert pooled_wasserstein([a], [b], held=64) == pytest.approx(expected, rel=1e-14)


def test_eight_bit_formats_are_counted():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    a = codes[codes.float().isfinite()]
    b = a.float().mul(-2).clamp(-448, 448).to(torch.float8_e4m3fn)
    expected = wasserstein_1d(a.double(), b.double())
    assert pooled_wasserstein([a], [b], held=10) == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("held", [4, 12])
def test_distances_beyond_the_range_are_infinite(held):
    largest = torch.finfo(torch.float64).max
    a = [largest * torch.linspace(0.6, 1, 9, dtype=torch.float64)]
    assert pooled_wasserstein(a, [-a[0]], held=held) == math.inf
    assert pooled_wasserstein(a, [a[0].flip(0)], held=held) == 0.0


class _Counted(list):
    passes = 0

    def __iter__(self):
        self.passes += 1
        return super().__iter__()


def test_formats_of_16_bits_need_as_many_passes_at_any_size():
    passes = []
    for count in (30, 3000):
        a, b = (_Counted(_real(count, seed, torch.bfloat16)) for seed in (0, 1))
        pooled_wasserstein(a, b, held=50)
        passes.append(a.passes)
    assert passes[0] == passes[1] <= 4


def test_layout_and_gradients_do_not_matter():
    b = torch.randn(30, 40, generator=torch.Generator().manual_seed(0))
    a = torch.nn.Parameter((b + 0.5).mT)
    found = pooled_wasserstein([a, a[::2, 1]], [b, b[1, ::2]], held=64)
    assert found == pytest.approx(0.5, rel=1e-6)


@pytest.mark.parametrize("held", [1, 2**20])
def test_what_cannot_be_pooled_is_refused(held):
    for a, b, counts in (([torch.ones(2)], [torch.ones(3)], "2 and 3"), ([], [], "0 and 0")):
        with pytest.raises(ValueError, match=f"must hold equally many values, got {counts}"):
            pooled_wasserstein(a, b, held=held)
    with pytest.raises(ValueError, match=r"must be floating-point, got torch.int64"):
        pooled_wasserstein([torch.ones(3)], [torch.ones(3).long()], held=held)


WIDE = {np.float32: torch.float32, np.float64: torch.float64}


def _samples(dtype):
    limit = float(np.finfo(dtype).max)
    extreme = st.sampled_from([0.0, -0.0, limit, -limit, math.inf, -math.inf, math.nan])
    numbers = st.floats(width=np.dtype(dtype).itemsize * 8) | extreme
    return hnp.arrays(dtype, st.integers(0, 60), elements=numbers)


@pytest.mark.parametrize("dtype", WIDE)
@settings(max_examples=150)
@given(st.data(), st.integers(1, 20))
def test_ranges_hold_every_finite_value_once_and_in_order(dtype, data, held):
    sides = [[torch.from_numpy(data.draw(_samples(dtype)))] for _ in range(2)]
    ranges = cut_into_ranges(tuple(sides), WIDE[dtype], held)
    for side, parts in enumerate(sides):
        found = [np.empty(0, dtype)]
        for part in ranges:
            if part.single:
                found.append(np.full(part.counts[side], part.low))
            else:
                assert sum(part.counts) <= held
                found.append(gather(parts, part, side))
        values = parts[0].numpy()
        assert np.array_equal(np.concatenate(found), np.sort(values[np.isfinite(values)]))
    for part, following in itertools.pairwise(ranges):
        assert part.high <= following.low
    for part in ranges:
        assert sum(part.counts) > (held if part.single else 0)


def test_a_value_in_more_places_than_allowed_is_not_stored():
    side = [torch.tensor([0.5, 1.0, 2.0]), torch.full((100,), 1.0)]
    found = cut_into_ranges((side, [torch.ones(3)]), torch.float32, 10)
    assert [(float(part.low), part.counts) for part in found if part.single] == [(1.0, (101, 3))]
    assert len(found) == 3


def test_walking_widens_every_format_and_leaves_the_tensors_alone():
    parts = [torch.tensor([-0.0, 1.5]).to(format) for format in (torch.bfloat16, torch.float64)]
    for values in walk(parts, torch.float64):
        assert values.dtype == np.float64
        assert values.tolist() == [0.0, 1.5]
        assert not np.signbit(values[0])
        values[:] = 7
    assert [part.tolist() for part in parts] == [[-0.0, 1.5]] * 2


@settings(max_examples=40)
@given(st.integers(1, 200), st.integers(0, 99), st.integers(2, 90))
def test_no_range_or_order_changes_a_bit_of_the_pooled_distance(size, seed, held):
    generator = torch.Generator().manual_seed(seed)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        a, b = (torch.randn(size, generator=generator).to(dtype) for _ in range(2))
        b[: size // 3] = a[0]  # many of one value, in a range of its own
        whole = wasserstein_1d(a, b)
        shuffled = [x[torch.randperm(size, generator=generator)] for x in (a, b)]
        parts = ([x for x in each.tensor_split(4) if x.numel()] for each in shuffled)
        assert pooled_wasserstein(*parts, held=held) == whole
