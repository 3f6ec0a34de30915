"""The compiled loops add up what torch's operators do, whatever sizes a block of values mixes."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics import exact_loop, exact_sums
from stability.metrics.exact_sums import ExactSum, merged_gap_sum, sum_of_bins

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
NEAR = st.integers(-(2**24), 2**24).map(lambda n: float(np.float32(n * 2.0**-30)))
ANY = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1.0, -1.0])
# a drift is a small change of most values: so many bits apart that one grain holds all of them
EDGES = st.integers(-28, 28).map(lambda power: 1.9999999 * 2.0**power)


def _joined(bins):
    return [repr(sum_of_bins(each)) for each in bins]


@settings(max_examples=150)
@given(
    st.sampled_from([FINITE, NEAR, ANY, EDGES, NEAR | EDGES]).flatmap(
        lambda value: st.lists(st.tuples(value, value), min_size=1, max_size=30)
    ),
    st.sampled_from([1, 3, 2048]),
)
def test_every_loop_gives_the_sums_of_torchs_operators(values, block):
    a, b = (torch.tensor(side, dtype=torch.float32) for side in zip(*values, strict=True))
    by_torch, *others = exact_sums.add_by_torch(a, b)
    ours, *ours_others = exact_sums._add_on_cpu(*(x.repeat(block) for x in (a, b)))
    assert _joined(ours) == _joined(by_torch * block)
    assert repr(ours_others) == repr([others[0] * block, others[1]])
    assert _joined([exact_sums._gaps_on_cpu(a, b)]) == _joined([exact_sums.gaps_by_torch(a, b)])
    assert _joined([exact_sums._values_on_cpu(a)]) == _joined([exact_sums.values_by_torch(a)])
    for add in (exact_sums._squares_on_cpu, exact_sums.squares_by_torch, _both_ways_carried):
        bins = exact_sums.new_bins(b.device)
        add(b, bins)
        assert _joined([bins.numpy()]) == _joined([by_torch[3]])


def _both_ways_carried(values, bins):
    exact_sums.add_squares_(bins, values)
    exact_sums.carry_(exact_sums.carry_(bins))


def _far_apart(power):
    """Pairs as far apart as a block may be, of full mantissas: its sums are the largest."""
    most = np.float32(2.0**power * (2 - 2**-23))
    a = torch.full((9001,), float(most))
    b = -a.clone()
    b[::500] = 1e-3 * a[::500]
    return a, b


@pytest.mark.parametrize("power", [0, 100, 127, -80, -126, -149])
@pytest.mark.parametrize("least", [0, -20, -25, -26, -27, -28, -40])
def test_a_block_at_its_bounds_loses_nothing(power, least):
    a, b = _far_apart(power)
    b[5] = float(np.float32(2.0 ** max(power + least, -149) * (1 + 2**-23)))
    by_torch, *others = exact_sums.add_by_torch(a, b)
    ours, *ours_others = exact_sums._add_on_cpu(a, b)
    assert _joined(ours) == _joined(by_torch)
    assert ours_others == others
    assert _joined([exact_sums._gaps_on_cpu(a, b)]) == _joined([exact_sums.gaps_by_torch(a, b)])


def test_most_blocks_of_weights_are_added_as_integers():
    generator = torch.Generator().manual_seed(0)
    b = 0.02 * torch.randn(100_000, generator=generator)
    a = b + 1e-5 * torch.randn(100_000, generator=generator)
    powers = [
        exact_loop._block_powers(*(x[i : i + 2048].numpy() for x in (a, b)))
        for i in range(0, 100_000, 2048)
    ]
    assert sum(top - grain <= 50 for top, grain in powers) > 45


@settings(max_examples=200)
@given(
    st.lists(st.floats(-9, 9, width=32) | st.sampled_from([0.0, 1.0]), max_size=30),
    st.lists(st.floats(-9, 9, width=32) | st.sampled_from([0.0, 1.0]), max_size=30),
    st.lists(st.floats(-9, 9, width=32), max_size=4),
)
def test_ranges_add_up_to_the_whole_at_any_cut(a, b, cuts):
    size = min(len(a), len(b))
    a, b = (torch.tensor(sorted(side[:size]), dtype=torch.float64) for side in (a, b))
    total, surplus = ExactSum(), 0
    edges = [-10.0, *sorted(cuts), 10.0]
    for low, high in itertools.pairwise(edges):
        x, y = (side[(side >= low) & (side < high)] for side in (a, b))
        total += merged_gap_sum(x, y, surplus)
        surplus += x.numel() - y.numel()
    assert surplus == 0
    assert total == exact_sums.gap_sum(a, b)
