"""`round_to` past the ordinary: where a format ends, what chance decides, what a carrier may be."""

import math

import numpy as np
import pytest
import torch

from attention_kernels.formats import FORMATS, ROUNDINGS, format_named
from attention_kernels.random_bits import bits_at
from attention_kernels.rounding import round_into, round_to

CARRIERS = [torch.float32, torch.float64]
INF, NAN = math.inf, math.nan


def assert_rounds(values, expected, name, rounding="nearest_even"):
    """In both carriers; a zero's sign counts, a NaN's does not."""
    for carrier in CARRIERS:
        rounded = round_to(torch.tensor(values, dtype=carrier), name, rounding)
        np.testing.assert_array_equal(
            rounded.numpy(), np.array(expected, dtype=rounded.numpy().dtype)
        )
        wanted = torch.tensor(expected)
        number = ~wanted.isnan()
        assert rounded.signbit()[number].tolist() == wanted.signbit()[number].tolist()


@pytest.mark.parametrize(
    ("name", "rounding", "at_449", "at_463", "at_464", "at_465", "at_inf"),
    [
        ("e4m3", "nearest_even", 448, 448, 448, NAN, NAN),
        ("e4m3", "nearest_away", 448, 448, NAN, NAN, NAN),
        ("e4m3", "toward_zero", 448, 448, 448, 448, NAN),
        ("e4m3", "away", NAN, NAN, NAN, NAN, NAN),
        ("e4m3-saturate", "nearest_even", 448, 448, 448, 448, 448),
        ("e4m3-saturate", "away", 448, 448, 448, 448, 448),
        ("e4m3-saturate", "stochastic", 448, 448, 448, 448, 448),
        ("e4m3-flush-saturate", "toward_zero", 448, 448, 448, 448, 448),
    ],
)
def test_past_the_end_of_e4m3(name, rounding, at_449, at_463, at_464, at_465, at_inf):
    expected = [at_449, at_463, at_464, at_465, at_inf]
    assert_rounds([449, 463, 464, 465, INF], expected, name, rounding)
    assert_rounds([-449, -463, -464, -465, -INF], [-x for x in expected], name, rounding)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e6m9", "e2m1", "e10m3"])
def test_past_the_end_of_a_format_with_infinities(name):
    """The end is the tie between the largest value and the next, which would be even."""
    format = format_named(name)
    carriers = CARRIERS if format.exponent_bits < 8 else CARRIERS[1:]
    spacing = 2.0 ** (format.max_exponent - format.mantissa_bits)
    largest, edge = format.max_value, format.max_value + spacing / 2
    for carrier in carriers:
        tie = torch.tensor([edge, -edge], dtype=carrier)
        inside = torch.nextafter(tie, torch.zeros_like(tie))
        ends, infinite = [largest, -largest], [INF, -INF]
        assert round_to(tie, name).tolist() == infinite
        assert round_to(tie, name, "nearest_away").tolist() == infinite
        assert round_to(tie, name, "toward_zero").tolist() == ends
        assert round_to(inside, name).tolist() == ends
        assert round_to(inside, name, "nearest_away").tolist() == ends
        assert round_to(inside, name, "away").tolist() == infinite
        for rounding in ROUNDINGS:
            assert round_to(tie, name + "-saturate", rounding).tolist() == ends


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "name", [*FORMATS, "e3m4", "e9m5", "bf16-flush", "fp64-flush", "e4m3-flush"]
)
def test_infinities_nans_and_signed_zeros_stay(name, rounding):
    infinite = INF if format_named(name).infinities else NAN
    values = [INF, -INF, NAN, 0.0, -0.0]
    assert_rounds(values, [infinite, -infinite, NAN, 0.0, -0.0], name, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "name", ["fp32-saturate", "bf16-saturate", "e4m3-saturate", "e2m1-saturate"]
)
def test_a_saturating_format_makes_its_largest_value_of_infinity(name, rounding):
    largest = format_named(name).max_value
    values = [INF, -INF, NAN, 0.0, -0.0]
    assert_rounds(values, [largest, -largest, NAN, 0.0, -0.0], name, rounding)


def test_a_range_that_the_carrier_lacks_ends_where_the_carrier_does():
    x = torch.tensor([INF, 3.4e38, 2.0**-149, 3 * 2.0**-149, 2.0**-126])
    for name in ("e9m1", "e9m1-saturate"):
        assert round_to(x, name).tolist() == [INF, INF, 2.0**-149, 3 * 2.0**-149, 2.0**-126]
    assert round_to(x[2:], "e9m1-flush").tolist() == x[2:].tolist()
    double = torch.tensor([INF, 3.4e38], dtype=torch.float64)
    assert round_to(double, "e9m1-saturate").tolist() == [1.5 * 2.0**255, 2.0**128]
    # A finer format than the carrier: its largest value lies between two of the carrier's.
    for rounding in ("toward_zero", "nearest_even"):
        end = (2 - 2.0**-23) * 2.0**63
        assert round_to(x[:2], "e7m30-saturate", rounding).tolist() == [end, end]
    assert round_to(x[1:2], "e7m30", "toward_zero").item() == end


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "fp32", "e11m20"])
def test_a_flushing_format_makes_zero_of_what_would_be_subnormal(name):
    format = format_named(name)
    carriers = CARRIERS if format.exponent_bits < 11 else CARRIERS[1:]
    tiny, half = 2.0**format.min_exponent, 2.0**-format.mantissa_bits / 2
    for carrier in carriers:
        below = tiny * (1 - 2 * half) if format.mantissa_bits < 23 else tiny / 2
        x = torch.tensor([tiny, below, tiny / 2, -tiny, -below], dtype=carrier)
        for rounding in ROUNDINGS:
            rounded = round_to(x, name + "-flush", rounding)
            assert rounded.tolist() == [tiny, 0.0, 0.0, -tiny, 0.0]
            assert rounded.signbit().tolist() == [False, False, False, True, True]


def test_what_rounds_up_to_the_smallest_normal_value_is_not_flushed():
    """As hardware decides: after rounding. fp16 below 2**-14 has spacing 2**-24."""
    beside = [2.0**-14 - 2.0**-25, 2.0**-14 - 2.0**-25 - 2.0**-37]
    assert_rounds(beside, [2.0**-14, 0.0], "fp16-flush")
    assert_rounds(beside, [2.0**-14, 2.0**-14], "fp16-flush", "away")
    assert_rounds([2.0**-30], [0.0], "fp16-flush", "away")


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
