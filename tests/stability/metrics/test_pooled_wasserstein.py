"""Pooled W1 is one number, whether the values fit in memory, are walked in ranges, or counted."""

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

from stability.metrics.wasserstein import pooled_wasserstein, wasserstein_1d

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


many = settings(deadline=None, max_examples=300)


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
