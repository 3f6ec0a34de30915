"""W1 from sorted runs is that of the whole, whatever the runs, the ties and the threads."""

import itertools
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.drift import drift
from stability.metrics.exact_sums import gap_sum
from stability.metrics.sorted_runs import runs_gap_sum

VALUE = st.floats(width=32, allow_nan=False, allow_infinity=False) | st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 2.0]
)
RUNS = st.lists(st.lists(st.tuples(VALUE, VALUE), min_size=1, max_size=30), min_size=1, max_size=6)


@settings(max_examples=100)
@given(
    RUNS,
    st.integers(1, 3),
    st.sampled_from([2, 8, 64]),
    st.sampled_from([1, 2]),
    st.sampled_from([np.float32, np.float64]),
)
def test_runs_have_the_sum_of_the_whole(runs, threads, length, stride, dtype):
    starts = np.cumsum([0, *map(len, runs)])
    a, b = np.array(list(itertools.chain.from_iterable(runs)), dtype).T.copy()
    expected = gap_sum(*(torch.from_numpy(np.sort(side)) for side in (a, b)))
    for low, high in itertools.pairwise(starts.tolist()):
        for side in (a, b):
            side[low:high].sort()
    with mock.patch.multiple(
        "stability.metrics.sorted_runs", _RANGE=length, _STRIDE=stride, _PER_RUN=1
    ):
        assert runs_gap_sum(a, b, starts, threads) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_number_of_threads_changes_a_bit_of_a_drift(dtype, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    b = {str(i): 0.02 * torch.randn(300, 170, generator=generator) for i in range(4)}
    b |= {"gain": torch.ones(70_000), "bias": torch.zeros(90)}
    a = {name: x + 1e-3 * torch.randn(x.shape, generator=generator) for name, x in b.items()}
    a, b = ({name: x.to(dtype) for name, x in state.items()} for state in (a, b))
    monkeypatch.setattr("torch.get_num_threads", lambda: 3)
    threaded = drift(a, b)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)
    assert drift(a, b) == threaded
    joined = ({"w": torch.cat([x.flatten() for x in state.values()])} for state in (a, b))
    assert drift(*joined)["all"] == threaded["all"]
