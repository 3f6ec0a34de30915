"""Formats and their rounding against gfloat, in every mode: all patterns, and millions of draws.

gfloat describes a format by its bits, bias and reserved patterns, and computes in FP64. It has no
`-flush` (its formats without subnormals have normal numbers there), it keeps the pattern of -2 in
`int8`, and what its stochastic rounding has in common with ours stands at the test of it.
"""

import gfloat
import numpy as np
import pytest
import torch
from gfloat import RoundMode
from gfloat import formats as gfloat_formats

from attention_kernels.formats import FORMATS, format_named
from attention_kernels.rounding import round_to
from tests.kernels.drawn_values import drawn

THEIRS = {
    "fp64": gfloat_formats.format_info_binary64,
    "fp32": gfloat_formats.format_info_binary32,
    "fp16": gfloat_formats.format_info_binary16,
    "bf16": gfloat_formats.format_info_bfloat16,
    "e4m3": gfloat_formats.format_info_ocp_e4m3,
    "e5m2": gfloat_formats.format_info_ocp_e5m2,
    "e2m1": gfloat_formats.format_info_ocp_e2m1,
    "e2m3": gfloat_formats.format_info_ocp_e2m3,
    "e3m2": gfloat_formats.format_info_ocp_e3m2,
    "int8": gfloat_formats.format_info_ocp_int8,
}
"""The formats that gfloat names itself; the others are described to it."""
MODES = {
    "nearest_even": (RoundMode.TiesToEven, RoundMode.TiesToEven),
    "nearest_away": (RoundMode.TiesToAway, RoundMode.TiesToAway),
    "toward_zero": (RoundMode.TowardZero, RoundMode.TowardZero),
    "away": (RoundMode.TowardPositive, RoundMode.TowardNegative),
}
"""gfloat's mode for positive and for negative values."""
STOCHASTIC = (RoundMode.StochasticFastest, RoundMode.StochasticFastest)
CARRIERS = (np.float32, np.float64)


def bits_of(name):
    format = format_named(name)
    return 1 + format.exponent_bits + format.mantissa_bits


def of_bits(bits):
    """The IEEE-like formats of so many bits, by name."""
    names = []
    for exponent in range(2, min(bits - 2, 11) + 1):
        name = f"e{exponent}m{bits - 1 - exponent}"
        is_other = name in FORMATS and FORMATS[name].encoding != "ieee"
        names.append(name + "-ieee" * is_other)
    return names


WIDE = ["tf32", "fp32", "fp64"]
SHORT = [name for name in FORMATS if name not in WIDE]
IEEE_LIKE = [name for bits in range(4, 9) for name in of_bits(bits) if name not in FORMATS]
DRAWN = [*FORMATS, "e3m4", "e6m9", "e8m15", "e9m7", "e10m20", "e11m30"]


def info_of(name):
    return THEIRS.get(name) or described(name)


def described(name):
    """What gfloat is told of a format that it has no name for."""
    format = format_named(name)
    fnuz = format.encoding == "fnuz"
    ieee_bias = 2 ** (format.exponent_bits - 1) - 1
    return gfloat.FormatInfo(
        name=name,
        k=bits_of(name),
        precision=format.mantissa_bits + 1,
        bias=(11 if "b11" in name else ieee_bias + 1) if fnuz else ieee_bias,
        is_signed=True,
        domain=gfloat.Domain.Finite if fnuz else gfloat.Domain.Extended,
        has_nz=not fnuz,
        num_high_nans=0 if fnuz else 2**format.mantissa_bits - 1,
        has_subnormals=True,
        is_twos_complement=False,
    )


def rounded_by_gfloat(x, name, modes, saturate, *random):
    info, wide = info_of(name), x.astype(np.float64)
    saturate |= format_named(name).encoding in ("finite", "int")
    rounded, downward = (
        gfloat.round_ndarray(info, wide, mode, saturate, *random) for mode in modes
    )
    rounded = np.where(np.signbit(wide), downward, rounded)
    return np.where(rounded == -2, -127 / 64, rounded) if name == "int8" else rounded


def assert_same(found, wanted):
    np.testing.assert_array_equal(found, wanted)
    number = ~np.isnan(wanted)
    np.testing.assert_array_equal(np.signbit(found)[number], np.signbit(wanted)[number])


def assert_rounds_as_gfloat(x, name, rounding, saturates=(False, True)):
    for saturate in saturates:
        values, ours = x, name + "-saturate" * saturate
        if saturate and format_named(name).max_value > float(np.finfo(x.dtype).max):
            values = x[np.isfinite(x)]  # the largest value, which infinity becomes, isn't in x's
        found = round_to(torch.from_numpy(values), ours, rounding)
        with np.errstate(all="ignore"):
            wanted = rounded_by_gfloat(values, name, MODES[rounding], saturate).astype(x.dtype)
        assert_same(found.numpy(), wanted)


def around(name, carrier):
    """Every value, every midpoint, points past the end, and the neighbours of each."""
    patterns = np.arange(2 ** (bits_of(name) - 1))
    grid = gfloat.decode_ndarray(info_of(name), patterns)
    grid = grid[np.isfinite(grid)]
    tiny = grid[1] * np.array([0.25, 0.75])
    ends = [1e30, np.finfo(carrier).max, np.finfo(carrier).tiny, np.inf, np.nan]
    with np.errstate(over="ignore"):
        past = grid[-1] + (grid[-1] - grid[-2]) * np.array([0.25, 0.5, 0.75, 1, 1.5, 2])
        points = np.concatenate([grid, grid[:-1] / 2 + grid[1:] / 2, past, tiny, ends])
        points = points.astype(carrier)
        beside = [np.nextafter(points, carrier(end)) for end in (-np.inf, np.inf)]
    points = np.concatenate([points, *beside])
    return np.concatenate([points, -points])


def test_a_format_described_to_gfloat_is_the_one_that_it_names():
    ieee_like = [name for name in THEIRS if format_named(name).encoding == "ieee"]
    assert ieee_like == ["fp64", "fp32", "fp16", "bf16", "e5m2"]
    for name in ieee_like:
        assert vars(described(name)) | {"name": ""} == vars(THEIRS[name]) | {"name": ""}


@pytest.mark.parametrize("name", [*SHORT, *IEEE_LIKE])
def test_every_pattern_has_the_value_of_gfloat(name):
    patterns = np.arange(2 ** bits_of(name))
    values = np.array([format_named(name).value_of(pattern) for pattern in patterns.tolist()])
    assert_same(values, gfloat.decode_ndarray(info_of(name), patterns))


@pytest.mark.parametrize("name", WIDE)
def test_patterns_of_a_wide_format_have_the_values_of_gfloat(name):
    drawn = np.random.default_rng(0).integers(0, 2 ** bits_of(name), 20_000, dtype=np.uint64)
    values = np.array([format_named(name).value_of(pattern) for pattern in drawn.tolist()])
    with np.errstate(invalid="ignore"):
        assert_same(values, gfloat.decode_ndarray(info_of(name), drawn))


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", [*SHORT, *IEEE_LIKE])
def test_every_value_every_midpoint_and_their_neighbours_round_as_gfloat(name, rounding):
    for carrier in CARRIERS:
        assert_rounds_as_gfloat(around(name, carrier), name, rounding)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", ["tf32", *of_bits(16)])
def test_every_value_of_16_bits_or_tf32_and_what_is_around_it_rounds_as_gfloat(name, rounding):
    for carrier in CARRIERS:
        saturates = (carrier == np.float32,)
        assert_rounds_as_gfloat(around(name, carrier), name, rounding, saturates)


@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", DRAWN)
def test_draws_round_as_gfloat(name, rounding):
    for carrier in CARRIERS:
        assert_rounds_as_gfloat(drawn(2_000, carrier), name, rounding)


@pytest.mark.slow
@pytest.mark.parametrize("rounding", MODES)
@pytest.mark.parametrize("name", DRAWN)
def test_millions_of_draws_round_as_gfloat(name, rounding):
    for seed, saturate in enumerate((False, True)):
        for carrier in CARRIERS:
            x = drawn(125_000, carrier, seed + 1)
            assert_rounds_as_gfloat(x, name, rounding, (saturate,))


def fractions(x, name):
    """How far each magnitude is past its neighbour nearer to zero, in units of the spacing."""
    format, wide = format_named(name), np.abs(x.astype(np.float64))
    exponent = np.maximum(np.frexp(wide)[1] - 1, format.min_exponent)
    return np.ldexp(wide, format.mantissa_bits - exponent) % 1


def assert_goes_up_as_gfloat(count, name, carrier):
    """Hold stochastic rounding against gfloat, for bits drawn and for those where it turns.

    We go away from zero where the fraction exceeds r / 2**24, r being the upper 24 bits;
    gfloat's StochasticFastest does where fraction + s / 2**n >= 1. For s = 2**n - 1 - r 2**(n - 24)
    that is a fraction of at least r / 2**24 + 2**-n: the same, if it is a multiple of 2**-n. n is
    52, so that the sum is exact in FP64. Only FP64 values below a format's smallest normal one have
    other fractions, and are left out. With n = 24 a finer fraction goes up for one r fewer, and
    gfloat's other stochastic modes round the fraction to n bits, or add half of the last.
    """
    x = drawn(count, carrier)
    x = x[np.isfinite(x)]
    x = x[np.ldexp(fractions(x, name), 52) % 1 == 0]
    assert len(x) > 0.9 * count
    generator = np.random.default_rng(5)
    bits = generator.integers(0, 2**32, len(x))
    turns = np.floor(fractions(x, name) * 2**24) + generator.integers(-1, 2, len(x))
    for random in (bits, turns.clip(0, 2**24 - 1).astype(np.int64) << 8 | bits & 0xFF):
        mirrored = 2**52 - 1 - (random >> 8 << 28)
        for saturate in (False, True):
            ours = name + "-saturate" * saturate
            found = round_to(torch.from_numpy(x), ours, "stochastic", bits=torch.from_numpy(random))
            with np.errstate(over="ignore"):
                wanted = rounded_by_gfloat(x, name, STOCHASTIC, saturate, mirrored, 52)
                assert_same(found.numpy(), wanted.astype(carrier))


@pytest.mark.parametrize("name", DRAWN)
def test_rounds_stochastically_as_gfloat_with_the_random_number_mirrored(name):
    for carrier in CARRIERS:
        assert_goes_up_as_gfloat(1_000, name, carrier)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRAWN)
def test_millions_of_draws_round_stochastically_as_gfloat(name):
    for carrier in CARRIERS:
        assert_goes_up_as_gfloat(65_000, name, carrier)
