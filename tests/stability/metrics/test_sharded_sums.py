"""Sums and norms over ranks are those of the whole, to the bit and in any layout."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.exact_sums import ExactSum, pair_sums
from stability.metrics.pieces import held_values
from stability.metrics.sharded_sums import add_sums, norm_of
from tests.stability.metrics.simulated_ranks import on_ranks

UNITS = st.integers(-(2**2160), 2**2160) | st.integers(-3, 3)
SUMS = st.builds(ExactSum, UNITS, st.sampled_from([0.0, math.inf, -math.inf, math.nan]))


@settings(max_examples=60)
@given(
    st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(SUMS, min_size=n, max_size=n), min_size=1, max_size=4)
    )
)
def test_sums_of_any_size_are_added_up_over_ranks(rows):
    expected = [sum(column, ExactSum()) for column in zip(*rows, strict=True)]
    for found in on_ranks(len(rows), lambda rank: add_sums(rank, rows[rank.index])):
        assert repr(found) == repr(expected)


VALUES = st.lists(st.floats(width=32), min_size=1, max_size=40)


@settings(max_examples=80)
@given(VALUES, st.sampled_from([torch.float32, torch.float64, torch.bfloat16]), st.integers(1, 9))
def test_a_norm_is_the_root_of_the_exact_sum_of_squares(values, dtype, parts):
    tensor = torch.tensor(values, dtype=torch.float64).to(dtype)
    wide = tensor if dtype == torch.float64 else tensor.float()
    expected = math.sqrt(float(pair_sums(wide, wide).b_square))
    cut = [part.reshape(-1, 1) for part in tensor.flip(0).tensor_split(parts)]
    assert repr(norm_of(cut)) == repr(expected)
    exact = tensor.double().tolist()
    if all(map(math.isfinite, exact)):
        square = float(sum(Fraction(x) ** 2 for x in exact))
        assert expected == pytest.approx(math.sqrt(square), rel=1e-15)


def test_a_norm_has_room_for_any_number_of_values(monkeypatch):
    values = torch.randn(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = norm_of([values])
    monkeypatch.setattr("stability.metrics.sharded_sums._PART", 7)
    monkeypatch.setattr("stability.metrics.sharded_sums._ROOM", 20)
    monkeypatch.setattr("stability.metrics.exact_sums._CHUNK", 3)
    assert norm_of([values[:400], values[400:]]) == whole


def test_a_norm_of_nothing_is_zero():
    assert norm_of([]) == norm_of([torch.empty(0)]) == 0.0
    parameter = torch.nn.Parameter(torch.tensor([3.0, 4.0]))
    assert norm_of([parameter, torch.tensor(12.0)]) == 13.0
    assert [values.tolist() for values in held_values([parameter])] == [[3.0, 4.0]]
