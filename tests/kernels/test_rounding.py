"""`round_to` against torch's casts, the grids written out, and at the ends of a format."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.formats import FORMATS, ROUNDINGS, Format, format_named
from attention_kernels.random_bits import bits_at
from attention_kernels.rounding import round_into, round_to

CARRIERS = [torch.float32, torch.float64]
INF, NAN = math.inf, math.nan
TORCHS = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}
ENCODED = [name for name, f in FORMATS.items() if f.encoding in ("fnuz", "finite", "int")]
WRITTEN_OUT = ["fp16", "bf16", "e4m3", "e5m2", "e3m4", "e2m1-ieee", "e6m9", "e8m1", *ENCODED]


def same(x, y):
    """Equal in value and sign of zero, NaN equal to NaN of any sign and payload."""
    both_nan = x.isnan() & y.isnan()
    return bool((both_nan | ((x == y) & (x.signbit() == y.signbit()))).all())


def positive_grid(name):
    """Every finite value >= 0, ascending, in FP64, from the definition of a binary format."""
    format = format_named(name)
    steps = 2**format.mantissa_bits
    count = torch.arange((2**format.exponent_bits - int(format.infinities)) * steps).double()
    exponent = torch.div(count, steps, rounding_mode="floor")
    fraction = torch.where(exponent > 0, count % steps + steps, count)
    scale = (exponent.clamp(min=1) - 1 + format.min_exponent - format.mantissa_bits).long()
    values = fraction * (scale + 1023 << 52).view(torch.float64)
    return values[:-1] if format.encoding == "fn" else values


def minus(x, name):
    """The negative of values of a format: of zero it is zero where zero has no sign."""
    return -x if format_named(name).negative_zero else 0.0 - x


def random_patterns(count, dtype=torch.float32):
    """Random bit patterns: every exponent alike, infinities, NaN and subnormals among them."""
    generator = torch.Generator().manual_seed(0)
    size, integer = (32, torch.int32) if dtype == torch.float32 else (64, torch.int64)
    bounds = (-(2 ** (size - 1)), 2 ** (size - 1) - 1, (count,))
    return torch.randint(*bounds, generator=generator, dtype=integer).view(dtype)


def spread(count, dtype):
    """Random values with exponents from 2**-45 to 2**45, where narrow formats begin and end."""
    generator = torch.Generator().manual_seed(1)
    exponent = torch.randint(-45, 46, (count,), generator=generator)
    return torch.ldexp(torch.randn(count, dtype=dtype, generator=generator), exponent)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2"])
def test_the_grid_written_out_is_torchs(name):
    dtype = TORCHS[name]
    size, integer = (15, torch.int16) if dtype.itemsize == 2 else (7, torch.uint8)
    patterns = torch.arange(2**size).to(integer).view(dtype).double()
    assert torch.equal(patterns[patterns.isfinite()], positive_grid(name))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2", "e3m4", "e6m9", *ENCODED])
def test_every_value_on_a_grid_stays(name, rounding):
    grid = positive_grid(name)
    for carrier in CARRIERS:
        x = torch.cat([grid, minus(grid, name)]).to(carrier)
        assert same(round_to(x, name, rounding), x)


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
@pytest.mark.parametrize("name", WRITTEN_OUT)
def test_between_neighbours_the_mode_decides(name, carrier):
    """At every midpoint, and beside it and beside both neighbours, by the carrier's own spacing."""
    grid = positive_grid(name)
    low, high = (x.to(carrier) for x in (grid[:-1], grid[1:]))
    middle = ((grid[:-1] + grid[1:]) / 2).to(carrier)
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    up = torch.nextafter
    points = {
        "above low": (up(low, high), low, low),
        "below middle": (up(middle, low), low, low),
        "middle": (middle, even, high),
        "above middle": (up(middle, high), high, high),
        "below high": (up(high, low), high, high),
    }
    for where, (x, to_even, to_away) in points.items():
        for sign in (1, -1):
            wanted = {"nearest_even": to_even, "nearest_away": to_away}
            wanted |= {"toward_zero": low, "away": high}
            signed = {mode: y if sign == 1 else minus(y, name) for mode, y in wanted.items()}
            for mode, y in signed.items():
                assert same(round_to(sign * x, name, mode), y), (where, mode)
            to_either = round_to(sign * x, name, "stochastic")
            down, up_ = signed["toward_zero"], signed["away"]
            assert bool(((to_either == down) | (to_either == up_)).all()), where


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2"])
def test_a_million_random_fp32_values_round_as_torch_casts(name):
    x = random_patterns(1_000_000)
    cast = x.to(TORCHS[name]).float()
    assert same(round_to(x, name), cast)
    assert same(round_to(x[:200_000].double(), name), cast[:200_000].double())


def test_a_million_random_fp32_values_round_as_torch_casts_to_e4m3():
    """Beyond 464, half a spacing past the largest value, torch 2.11 gives NaN, torch 2.13 448."""
    x = torch.cat([random_patterns(500_000), spread(500_000, torch.float32)])
    cast = x.to(torch.float8_e4m3fn).float()
    beyond = x.abs() > 464
    limit = torch.where(x.isnan(), x, torch.full_like(x, 448.0).copysign(x))
    assert same(round_to(x, "e4m3"), torch.where(beyond, torch.nan, cast))
    assert same(round_to(x, "e4m3-saturate"), torch.where(beyond, limit, cast))


formats = st.builds(
    lambda exponent, mantissa, flush, saturate: format_named(
        f"e{exponent}m{mantissa}" + "-flush" * flush + "-saturate" * saturate
    ),
    st.integers(2, 11),
    st.integers(1, 52),
    st.booleans(),
    st.booleans(),
) | st.sampled_from([*FORMATS.values(), format_named("e4m3-saturate")])
carriers = st.sampled_from(CARRIERS)
patterns = st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=20)


def values(patterns, carrier):
    """Any bit patterns, NaN left out, in FP64 or the nearest values of FP32."""
    x = torch.tensor(patterns, dtype=torch.int64).view(torch.float64)
    narrow = (torch.tensor(patterns) >> 32).to(torch.int32).view(torch.float32)
    x = x if carrier == torch.float64 else narrow
    return x[~x.isnan()]


@settings(max_examples=300)
@given(patterns, carriers, formats, st.sampled_from(ROUNDINGS))
def test_rounding_twice_is_rounding_once(patterns, carrier, format, rounding):
    once = round_to(values(patterns, carrier), format, rounding)
    for again in ROUNDINGS:
        assert same(round_to(once, format, again), once)


@settings(max_examples=300)
@given(patterns, carriers, formats, st.sampled_from(ROUNDINGS))
def test_the_sign_changes_the_sign_alone(patterns, carrier, format, rounding):
    x = values(patterns, carrier)
    changed, kept = round_to(-x, format, rounding), -round_to(x, format, rounding)
    assert same(changed, kept if format.negative_zero else 0.0 + kept)


@settings(max_examples=300)
@given(patterns, carriers, formats, st.sampled_from(ROUNDINGS), st.integers(0, 2**32 - 1))
def test_rounding_keeps_the_order(patterns, carrier, format, rounding, number):
    x = values(patterns, carrier).sort().values
    rounded = round_to(x, format, rounding, bits=torch.tensor(number))
    rounded = rounded[~rounded.isnan()]  # past the end of a format without infinities
    assert bool((rounded.diff() >= 0).logical_or(rounded.diff().isnan()).all())


@settings(max_examples=300)
@given(patterns, carriers, formats, st.sampled_from(ROUNDINGS))
def test_every_result_is_one_of_the_two_neighbours(patterns, carrier, format, rounding):
    x = values(patterns, carrier)
    rounded = round_to(x, format, rounding)
    below, above = round_to(x, format, "toward_zero"), round_to(x, format, "away")
    is_below, is_above = (rounded == below) | rounded.isnan(), (rounded == above) | rounded.isnan()
    assert bool((is_below | is_above).all())
    assert bool((below.abs() <= x.abs()).logical_or(below.isnan()).all())
    if not (format.saturate or not format.subnormals):
        assert bool((above.abs() >= x.abs()).logical_or(above.isnan()).all())


def test_no_bit_pattern_of_fp64_is_rounded_through_fp32():
    twice_wrong = torch.tensor([1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40], dtype=torch.float64)
    assert round_to(twice_wrong, "bf16")[0].item() == 1 + 2**-7
    assert round_to(twice_wrong, "fp16")[1].item() == 1 + 2**-10


def test_a_format_object_needs_no_name():
    ieee = Format(name="mine", exponent_bits=4, mantissa_bits=3)
    x = torch.tensor([240.0, 247.9, 248.0, 1.0625, 2.0**-10, 1.01 * 2.0**-10])
    expected = [240.0, 240.0, torch.inf, 1.0, 0.0, 2.0**-9]
    assert round_to(x, ieee).tolist() == expected
    assert round_to(x.double(), ieee).tolist() == expected


def test_a_format_of_fp16s_bits_and_another_bias_is_not_fp16():
    shifted = Format(name="mine", exponent_bits=5, mantissa_bits=10, bias=14)
    x = torch.tensor([65519.0, 100_000.0, 131_008.0, 131_072.0, 2.0**-24, 3 * 2.0**-24])
    expected = [65504.0, 99_968.0, 131_008.0, torch.inf, 0.0, 2.0**-22]
    for carrier in CARRIERS:
        assert round_to(x.to(carrier), shifted).tolist() == expected
        assert round_into(x.to(carrier), shifted, torch.float64).tolist() == expected


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
@pytest.mark.parametrize(
    ("name", "value", "low", "high"),
    [
        ("bf16", 1 + 2**-9, 1.0, 1 + 2**-7),
        ("bf16", -(1 + 2**-7 + 2**-8), -(1 + 2**-7), -(1 + 2**-6)),
        ("e4m3", 1.03, 1.0, 1.125),
        ("e4m3", 2.0**-12, 0.0, 2.0**-9),
        ("fp16", 65504.0 + 4.0, 65504.0, INF),
        ("e3m4", 0.2, 0.1875, 0.203125),
    ],
)
def test_stochastic_rounding_keeps_the_mean(name, value, low, high, carrier):
    """Of n draws a binomial number goes up; 5 of its standard deviations hold but 6e-7 of seeds.

    The chance is a multiple of 2**-24 at or just above the fraction, which n can't resolve.
    """
    n = 100_000
    x = torch.full((n,), value, dtype=carrier)
    spacing = 32.0 if math.isinf(high) else abs(high - low)
    chance = abs(x[0].item() - low) / spacing
    rounded = round_to(x, name, "stochastic", seed=5)
    assert set(rounded.tolist()) == {low, high}
    bound = 5 * math.sqrt(chance * (1 - chance) / n) + 2.0**-24
    assert abs((rounded == high).double().mean().item() - chance) < bound


@pytest.mark.parametrize("carrier", CARRIERS, ids=str)
def test_stochastic_rounding_goes_up_for_as_many_random_numbers_as_the_fraction_says(carrier):
    """bf16 of 1 + f 2**-7 goes up for f 2**24 of the 2**24 random numbers: the first ones."""
    for drawn, fraction in ((0, 2**-16), (2**8 - 1, 2**-16), (2**8, 2**-16), (2**23, 0.5)):
        x = torch.tensor([1 + fraction * 2**-7, -1 - fraction * 2**-7], dtype=carrier)
        rounded = round_to(x, "bf16", "stochastic", bits=torch.tensor(drawn << 8 | 0xFF))
        goes_up = drawn < fraction * 2**24
        assert rounded.abs().tolist() == [1 + goes_up * 2**-7] * 2, (drawn, fraction)


def test_a_seed_repeats_its_draws_and_another_does_not():
    x = torch.full((4096,), 1 + 2**-8)
    first = round_to(x, "bf16", "stochastic", seed=7)
    assert torch.equal(first, round_to(x, "bf16", "stochastic", seed=7))
    assert torch.equal(first, round_to(x.reshape(64, 64), "bf16", "stochastic", seed=7).flatten())
    agree = (first == round_to(x, "bf16", "stochastic", seed=8)).double().mean().item()
    assert abs(agree - 0.5) < 5 * 0.5 / 64


def test_a_tile_draws_what_its_place_in_the_whole_draws():
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    rows, columns = torch.arange(64)[:, None], torch.arange(96)
    whole = round_to(x, "e4m3", "stochastic", bits=bits_at(1, rows, columns))
    tile = bits_at(1, rows[16:48], columns[32:40])
    assert torch.equal(
        round_to(x[16:48, 32:40], "e4m3", "stochastic", bits=tile), whole[16:48, 32:40]
    )


def test_strided_and_empty_tensors_round():
    x = torch.randn(6, 8, dtype=torch.float64).mT
    for name in ("bf16", "e4m3", "e11m7", "fp16-flush-saturate"):
        assert torch.equal(round_to(x, name), round_to(x.contiguous(), name))
        assert round_to(x[:0], name).shape == (0, 6)
        assert round_to(x[0, 0], name).shape == ()


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e8m3", "e5m2-flush-saturate", "fp32-saturate"])
@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_the_argument_is_not_written_to(name, rounding):
    for carrier in CARRIERS:
        x = torch.tensor([1.01, -1e30, 1e-30, INF], dtype=carrier)
        before = x.clone()
        round_to(x, name, rounding)
        assert torch.equal(x, before)


def test_a_format_as_wide_as_the_carrier_is_no_copy():
    x = torch.ones(3)
    for name in ("fp32", "fp64", "e8m23", "e9m30"):
        assert round_to(x, name) is x
    for name in ("fp32-flush", "fp32-saturate", "e9m22"):
        assert round_to(x, name) is not x


def test_fp64_input_enters_an_fp32_carrier_rounded_once():
    twice_wrong = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    entered = round_into(twice_wrong, "bf16", torch.float32)
    assert entered.dtype == torch.float32
    assert entered.item() == 1 + 2**-7
    assert round_into(twice_wrong, "bf16", torch.bfloat16).item() == 1 + 2**-7


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, *CARRIERS])
@pytest.mark.parametrize("name", ["bf16", "fp16", "fp32", "e5m10-flush", "e8m7-saturate", "e4m3"])
def test_the_short_way_into_a_dtype_has_the_bits_of_the_long_one(name, stored):
    """The long one: widen to FP64, round there once, narrow, which is then exact."""
    values = torch.randn(4000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    special = torch.tensor([0.0, -0.0, INF, -INF, NAN, 65504, 65520, 1e-40, 1 + 2**-8 + 2**-40])
    scales = 2.0 ** torch.linspace(-160, 130, 4000, dtype=torch.float64)
    x = torch.cat([values * scales, values, special.double()]).to(stored)
    narrow = {"bf16": (torch.bfloat16,), "fp16": (torch.float16,)}.get(name, ())
    for into in (*narrow, *CARRIERS):
        expected, found = round_to(x.double(), name).to(into), round_into(x, name, into)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
        # torch's casts set or clear the sign of a NaN as their vector units happen to
        number = ~expected.isnan()
        assert torch.equal(found.signbit()[number], expected.signbit()[number])


def test_a_narrow_carrier_is_refused():
    for dtype in (torch.bfloat16, torch.float16, torch.int64):
        message = rf"round_to: x must be float32 or float64, got {dtype}; convert it first"
        with pytest.raises(ValueError, match=message):
            round_to(torch.ones(1, dtype=dtype), "bf16")


def test_an_unknown_rounding_or_format_is_refused_with_those_there_are():
    message = "round_to: rounding must be one of nearest_even, nearest_away, .*, got 'nearest'"
    with pytest.raises(ValueError, match=message):
        round_to(torch.ones(1), "bf16", "nearest")
    with pytest.raises(ValueError, match=r"format_named: name must be .*'bf61'; nearest: bf16"):
        round_to(torch.ones(1), "bf61")
