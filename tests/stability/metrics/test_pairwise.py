"""Distances between many states are those that `drift` and plain arithmetic give, NaN included."""

import math

import pytest
import torch

from stability.metrics.pairwise import pairwise_l2


def _parts(states, sizes=(7, 1, 20_000)):
    return [states[:, a : a + n] for a, n in zip((0, 7, 8), sizes, strict=True)]


def test_distances_and_norms_are_those_of_plain_arithmetic():
    dice = torch.Generator().manual_seed(0)
    states = torch.randn(4, 20_008, generator=dice)
    norms, found = pairwise_l2(_parts(states), 4)
    wide = states.double()
    expected = torch.stack([(wide - row).norm(dim=1) for row in wide])
    # 2e4 summands in FP64 in another order
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(norms, wide.norm(dim=1), rtol=1e-12, atol=0)
    assert torch.equal(found, found.T)


def test_states_one_ulp_apart_keep_their_distance():
    """|a|^2 + |b|^2 - 2ab would be 1e4 less 1e4, and leave 1e-6 where 6e-6 is due."""
    dice = torch.Generator().manual_seed(1)
    first = torch.randn(20_008, generator=dice)
    second = torch.nextafter(first, torch.tensor(torch.inf))
    _, found = pairwise_l2(_parts(torch.stack([first, second])), 2)
    assert found[0, 1].item() == pytest.approx((second.double() - first.double()).norm().item())
    assert 0 < found[0, 1] < 1e-4


def test_a_state_with_a_nan_is_nan_away_and_the_others_are_not():
    states = torch.ones(3, 20_008)
    states[1, 9_000] = math.nan
    states[2, 3] = 3.0
    norms, found = pairwise_l2(_parts(states), 3)
    assert found[0, 2] == 2.0
    assert found[0, 1].isnan()
    assert found[1, 2].isnan()
    assert norms[1].isnan()
    assert not norms[[0, 2]].isnan().any()


def test_one_state_has_no_pair():
    norms, found = pairwise_l2([torch.full((1, 4), 2.0)], 1)
    assert norms.tolist() == [4.0]
    assert found.tolist() == [[0.0]]
