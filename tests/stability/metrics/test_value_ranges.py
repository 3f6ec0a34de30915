"""Ranges hold every finite value once, in order, and never more of them than allowed."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stability.metrics.wasserstein import cut_into_ranges, gather, walk

WIDE = {np.float32: torch.float32, np.float64: torch.float64}


def _samples(dtype):
    limit = float(np.finfo(dtype).max)
    extreme = st.sampled_from([0.0, -0.0, limit, -limit, math.inf, -math.inf, math.nan])
    numbers = st.floats(width=np.dtype(dtype).itemsize * 8) | extreme
    return hnp.arrays(dtype, st.integers(0, 60), elements=numbers)


@pytest.mark.parametrize("dtype", WIDE)
@settings(deadline=None, max_examples=150)
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
