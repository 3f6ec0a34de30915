"""Values are sorted as numpy does, whichever way was taken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics import sorting
from stability.metrics.sorting_loop import sort_by_digits

SIZES = st.integers(1, 300)


@st.composite
def some_values(draw):
    """FP32 values of any bits, of a short range, or of few different ones."""
    size = draw(SIZES)
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    law = draw(st.sampled_from(["bits", "normal", "near", "next", "few", "ends"]))
    if law == "bits":
        return rng.integers(0, 2**32, size, np.uint32).view(np.float32)
    if law == "ends":
        ends = [0.0, -0.0, np.inf, -np.inf, 1e-45, -1e-45, 3.4028235e38, -3.4028235e38]
        return rng.choice(np.array(ends, np.float32), size)
    if law == "next":  # two that differ in the last bit alone
        return rng.choice(np.array([1.0, 1.0000001], np.float32), size)
    values = rng.standard_normal(size)
    if law == "near":
        values = 1 + 1e-5 * values
    return (np.round(values) if law == "few" else values).astype(np.float32)


@given(some_values())
@settings(max_examples=300)
def test_digits_sort_as_numpy_does(values):
    found, expected = values.copy(), np.sort(values)
    sorted_here = sort_by_digits(found.view(np.int32), np.empty(found.size, np.uint32))
    assert sorted_here == (not np.isnan(values).any())
    if not sorted_here:
        # untouched, so that numpy can
        assert found.tobytes() == values.tobytes()
        return
    assert (found == expected).all()
    # the same values, to the bit, minus zeros among them
    assert sorted(found.view(np.uint32)) == sorted(values.view(np.uint32))


@pytest.mark.parametrize("by_digits", [True, False])
@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 2**20, 2**20 + 1])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("special", [[], [-np.inf], [np.nan], [-np.nan, np.inf]])
def test_either_way_gives_the_same(by_digits, size, dtype, special, monkeypatch):
    monkeypatch.setattr(sorting, "_digits_are_faster", lambda: by_digits)
    values = np.random.default_rng(size).standard_normal(size).astype(dtype)
    values[: len(special)] = special[:size]
    found, apart = values.copy(), np.repeat(values, 2)
    sorting.sort_(found)
    sorting.sort_(apart[::2])  # every other one of them
    assert np.array_equal(found, np.sort(values), equal_nan=True)
    assert np.array_equal(apart[::2], found, equal_nan=True)
    assert np.array_equal(apart[1::2], values, equal_nan=True)


def test_the_digits_are_used_where_they_are_faster_and_there_alone(monkeypatch):
    taken = []
    monkeypatch.setattr(sorting, "_by_digits", lambda values: bool(taken.append(values.size)))
    for faster in (True, False):
        monkeypatch.setattr(sorting, "_digits_are_faster", lambda faster=faster: faster)
        for size, dtype in ((4095, "f4"), (4096, "f4"), (4096, "f8"), (2**20 + 1, "f4")):
            sorting.sort_(np.zeros(size, dtype))
    assert taken == [4096]


@pytest.mark.parametrize(("seconds", "faster"), [(0.5, False), (-0.5, True)])
def test_the_way_that_took_less_time_is_the_faster_one(seconds, faster, monkeypatch):
    now = [0.0]  # a clock on which numpy takes no time
    monkeypatch.setattr(sorting.time, "perf_counter", lambda: now[0])

    def digits(values):
        now[0] += seconds

    monkeypatch.setattr(sorting, "_by_digits", digits)
    assert sorting._digits_are_faster.__wrapped__() is faster
