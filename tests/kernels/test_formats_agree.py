"""Formats against ml_dtypes: every bit pattern, and the rounding of what lies between.

ml_dtypes casts with ties to even. It differs from `round_to` in two ways. Where a format has no
NaN, it makes minus zero of one, and `round_to` keeps it. And it casts FP64 through FP32, which
rounds twice, where `round_to` rounds once: there the grid itself is the reference.
"""

import ml_dtypes
import numpy as np
import pytest
import torch

from attention_kernels.formats import FORMATS, format_named
from attention_kernels.rounding import round_to
from tests.kernels.drawn_values import drawn

ML_DTYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e3m4": ml_dtypes.float8_e3m4,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e4m3-ieee": ml_dtypes.float8_e4m3,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e5m2": ml_dtypes.float8_e5m2,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
}
CARRIERS = {"fp32": np.float32, "fp64": np.float64}


def bits_of(name):
    format = format_named(name)
    return 1 + format.exponent_bits + format.mantissa_bits


def decoded(name):
    """The value of every pattern, in FP64, as the library's type has it."""
    patterns = np.arange(2 ** bits_of(name), dtype=np.uint8)
    return patterns.view(ML_DTYPES[name]).astype(np.float64)


def ours(x, name, rounding="nearest_even"):
    return round_to(torch.from_numpy(x), name, rounding).numpy()


def cast(x, name):
    """The library's rounding, in the dtype of x; a NaN is kept where its format has none."""
    with np.errstate(all="ignore"):
        rounded = x.astype(ML_DTYPES[name]).astype(x.dtype)
    return np.where(np.isnan(x), x, rounded)


def nearest(x, name):
    """The nearest value of the grid, of FP64 values within its range; ties to the even pattern."""
    grid = decoded(name)
    grid = grid[: len(grid) // 2]  # the patterns without a sign, which are in the order of values
    grid = grid[np.isfinite(grid)]
    size = np.abs(x)
    above = np.searchsorted(grid, size).clip(1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    # exact: both have few bits, and a comparison rounds nothing
    middle = (low + high) / 2
    up = (size > middle) | ((size == middle) & (above % 2 == 0))
    rounded = np.copysign(np.where(up, high, low), x)
    return rounded + 0.0 if "fnuz" in name else rounded  # there zero has no sign


def assert_same(found, wanted):
    np.testing.assert_array_equal(found, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


def around(name, carrier):
    """Every value, every midpoint, those just past the end, and the neighbours of each."""
    grid = decoded(name)
    grid = np.unique(np.abs(grid[np.isfinite(grid)]))
    step = grid[-1] - grid[-2]
    past = [grid[-1] + step / 2, grid[-1] + step, grid[-1] + 1.5 * step, 1e30]
    tiny = [grid[1] / 2, grid[1] / 4, 2.0**-126, 2.0**-140]
    points = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, past, tiny]).astype(carrier)
    points = np.concatenate([points, np.nextafter(points, 0), np.nextafter(points, carrier(2e30))])
    return np.concatenate([points, -points, np.array([np.inf, -np.inf, np.nan], carrier)])


def test_every_8_bit_or_shorter_format_of_the_table_is_held_against_ml_dtypes():
    short = {name for name in FORMATS if bits_of(name) <= 8}
    # int8 and the IEEE-like formats of 4 and 6 bits have no type there: gfloat alone has them
    alone = {"int8", "e3m2-ieee", "e2m3-ieee", "e2m1-ieee"}
    assert short == (set(ML_DTYPES) - {"e3m4"}) | alone


@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_pattern_has_the_value_of_ml_dtypes(name):
    values = np.array([format_named(name).value_of(i) for i in range(2 ** bits_of(name))])
    assert_same(values, decoded(name))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_every_16_bit_pattern_has_the_value_of_its_dtype(name):
    dtype = {"bf16": ml_dtypes.bfloat16, "fp16": np.float16}[name]
    patterns = np.arange(2**16, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # signalling NaN
        wanted = patterns.view(dtype).astype(np.float64)
    values = [format_named(name).value_of(pattern) for pattern in range(2**16)]
    assert_same(np.array(values), wanted)


def assert_rounds_as_the_others(x, name):
    """FP32 as ml_dtypes casts it; FP64 as the grid has it, or as ml_dtypes from FP32 on."""
    if x.dtype == np.float32:
        assert_same(ours(x, name), cast(x, name))
        return
    inside = x[np.abs(x) <= format_named(name).max_value]
    assert len(inside) > len(x) // 4
    assert_same(ours(inside, name), nearest(inside, name))
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = x.astype(np.float32)
    assert_same(ours(narrow.astype(np.float64), name), cast(x, name))


@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("name", ML_DTYPES)
def test_every_midpoint_and_its_neighbours_round_as_ml_dtypes(name, carrier):
    x = np.concatenate([around(name, carrier), drawn(5_000, carrier)])
    assert_rounds_as_the_others(x, name)


@pytest.mark.slow
@pytest.mark.parametrize("carrier", CARRIERS.values(), ids=CARRIERS)
@pytest.mark.parametrize("name", ML_DTYPES)
def test_millions_of_values_round_as_ml_dtypes(name, carrier):
    assert_rounds_as_the_others(drawn(2_000_000, carrier), name)


def test_ml_dtypes_rounds_fp64_twice_and_round_to_once():
    x = np.array([1.25 + 2.0**-40])  # just past the tie of 1 and 1.5, and in FP32 on it
    assert cast(x, "e2m1")[0] == 1.0
    assert ours(x, "e2m1")[0] == 1.5


@pytest.mark.parametrize("name", ["e2m1", "e2m3", "e3m2"])
def test_a_nan_is_kept_where_ml_dtypes_makes_minus_zero_of_it(name):
    nan = np.array([np.nan], np.float32)
    theirs = nan.astype(ML_DTYPES[name]).astype(np.float32)
    assert theirs[0] == 0
    assert np.isnan(ours(nan, name)[0])


def test_int8_rounds_as_numpy_rounds_64ths():
    x = drawn(50_000, np.float32)
    x = np.concatenate([x[~np.isnan(x)], np.arange(-300, 300, dtype=np.float32) / 128])
    wanted = np.clip(np.rint(x.astype(np.float64) * 64), -127, 127) / 64
    np.testing.assert_array_equal(ours(x, "int8"), wanted.astype(np.float32))
