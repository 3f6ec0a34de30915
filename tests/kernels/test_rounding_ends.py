"""What rounding gives at the ends of a format: overflow, infinity, NaN, saturation, flushing."""

import math

import numpy as np
import pytest
import torch

from attention_kernels.formats import FORMATS, ROUNDINGS, Format, format_named
from attention_kernels.rounding import round_to

INF, NAN = math.inf, math.nan
CARRIERS = [torch.float32, torch.float64]
ENCODED = [name for name, f in FORMATS.items() if f.encoding in ("fnuz", "finite", "int")]


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


@pytest.mark.parametrize("name", ["fp16", "bf16", "e5m2", "e6m9", "e2m1-ieee", "e10m3"])
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
    format = format_named(name)
    infinite = {"ieee": INF, "fn": NAN, "fnuz": NAN}.get(format.encoding, format.max_value)
    minus_zero = 0.0 if format.encoding in ("fnuz", "int") else -0.0
    values = [INF, -INF, NAN, 0.0, -0.0]
    assert_rounds(values, [infinite, -infinite, NAN, 0.0, minus_zero], name, rounding)


@pytest.mark.parametrize("name", ENCODED)
def test_a_zero_without_a_sign_gets_none_from_what_rounds_to_it(name):
    smallest = format_named(name).value_of(1)
    zero = 0.0 if name == "int8" or name.endswith("fnuz") else -0.0
    assert_rounds([-smallest / 4, -smallest], [zero, -smallest], name)
    if name != "int8":
        assert_rounds([-smallest], [zero], name + "-flush")


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    ("name", "largest"), [("e2m1", 6), ("e2m3", 7.5), ("e3m2", 28), ("int8", 127 / 64)]
)
def test_past_the_end_of_a_format_without_infinity_and_nan_is_its_end(name, largest, rounding):
    """Even where the tie beyond the end would be rounded away: MX v1.0, section 5.3, saturates."""
    beyond = [largest * 1.01, largest * 1.2, largest * 1.3, 1e30]
    assert_rounds(beyond, [largest] * 4, name, rounding)
    assert_rounds([-x for x in beyond], [-largest] * 4, name, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize(
    "name", ["fp32-saturate", "bf16-saturate", "e4m3-saturate", "e2m1-ieee-saturate"]
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


def test_a_format_whose_spacings_fp32_does_not_hold_rounds_fp32_and_fp64_alike():
    odd = Format(name="odd", exponent_bits=3, mantissa_bits=3, encoding="fn", bias=125)
    x = torch.arange(1, 8000, 7, dtype=torch.int32).mul_(2**13).view(torch.float32)
    for rounding in ROUNDINGS:
        wide = round_to(x.double(), odd, rounding)
        assert torch.equal(round_to(x, odd, rounding).double(), wide), rounding
        assert len(wide.unique()) > 20
