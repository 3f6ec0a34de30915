"""Weights are counted into published bins exactly, whatever their format."""

import math

import numpy as np
import pytest
import torch

from stability.metrics.weight_counts import WEIGHT_EDGES, weight_counts

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
MIDDLE = len(WEIGHT_EDGES) // 2


def _searched(values: torch.Tensor) -> list[int]:
    """The same counts by comparing each value with each bound."""
    numbers = values.double().flatten().numpy()
    inner = np.asarray(WEIGHT_EDGES)[MIDDLE:]
    counts = [0] * (len(WEIGHT_EDGES) + 1)
    for number in numbers[~np.isnan(numbers)]:
        outward = int((abs(number) >= inner).sum())
        counts[MIDDLE + (outward if number > 0 else -outward)] += 1
    return counts


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_weight_is_in_the_bin_between_its_bounds(dtype):
    generator = torch.Generator().manual_seed(0)
    sizes = 10.0 ** torch.empty(3000, dtype=torch.float64).uniform_(-8, 3, generator=generator)
    signs = torch.randint(0, 2, (3000,), generator=generator) * 2 - 1
    values = (sizes * signs).to(dtype)
    assert weight_counts([values.view(30, 100).T]) == _searched(values)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_a_bound_and_its_neighbours_are_told_apart(dtype):
    bounds = torch.tensor(WEIGHT_EDGES, dtype=dtype)
    far = torch.full_like(bounds, math.inf)
    values = torch.cat([bounds, torch.nextafter(bounds, far), torch.nextafter(bounds, -far)])
    assert weight_counts([values]) == _searched(values)


def test_zeros_are_in_the_middle_and_infinities_at_the_ends_and_nan_nowhere():
    values = torch.tensor([0.0, -0.0, 1e-40, math.inf, -math.inf, math.nan, -math.nan])
    counts = weight_counts([values, torch.arange(5)])
    assert (counts[0], counts[MIDDLE], counts[-1], sum(counts)) == (1, 3, 1, 5)


def test_the_bounds_grow_and_are_one_fewer_than_the_bins():
    assert list(WEIGHT_EDGES) == sorted(set(WEIGHT_EDGES))
    assert len(weight_counts([torch.ones(3)])) == len(WEIGHT_EDGES) + 1
    assert (WEIGHT_EDGES[MIDDLE], WEIGHT_EDGES[-1]) == (2.0**-20, 16.0)
