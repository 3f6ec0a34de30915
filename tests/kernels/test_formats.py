"""A format is what its name says: range, grid, container, and one spelling each."""

import math

import pytest
import torch

from attention_kernels.formats import FORMATS, Format, format_named
from attention_kernels.rounding import INPUT_DTYPES

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}


@pytest.mark.parametrize("name", DTYPES)
def test_a_format_that_torch_has_is_torchs(name):
    format, info = format_named(name), torch.finfo(DTYPES[name])
    assert format.max_value == info.max
    assert 2.0**format.min_exponent == info.tiny
    assert 2.0**-format.mantissa_bits == info.eps


@pytest.mark.parametrize(
    ("name", "largest", "smallest_normal", "smallest"),
    [
        ("tf32", (2 - 2**-10) * 2.0**127, 2.0**-126, 2.0**-136),
        ("e3m4", 15.5, 0.25, 2.0**-6),
        ("e2m1-ieee", 3.0, 1.0, 0.5),
        ("e2m3-ieee", 3.75, 1.0, 0.125),
        ("e3m2-ieee", 14.0, 0.25, 0.0625),
        ("e4m3-ieee", 240.0, 2.0**-6, 2.0**-9),
        ("e6m9", (2 - 2**-9) * 2.0**31, 2.0**-30, 2.0**-39),
        ("e8m15", (2 - 2**-15) * 2.0**127, 2.0**-126, 2.0**-141),
        ("e11m1", 1.5 * 2.0**1023, 2.0**-1022, 2.0**-1023),
    ],
)
def test_exmy_is_like_ieee(name, largest, smallest_normal, smallest):
    format = format_named(name)
    assert format.max_value == largest
    assert 2.0**format.min_exponent == smallest_normal
    assert 2.0 ** (format.min_exponent - format.mantissa_bits) == smallest


@pytest.mark.parametrize(
    ("name", "largest", "smallest_normal", "smallest"),
    [
        ("e2m1", 6.0, 1.0, 0.5),
        ("e2m3", 7.5, 1.0, 0.125),
        ("e3m2", 28.0, 0.25, 0.0625),
        ("int8", 127 / 64, 1.0, 1 / 64),
        ("e4m3fnuz", 240.0, 2.0**-7, 2.0**-10),
        ("e5m2fnuz", 57344.0, 2.0**-15, 2.0**-17),
        ("e4m3b11fnuz", 30.0, 2.0**-10, 2.0**-13),
    ],
)
def test_a_format_of_its_own_encoding_uses_its_top_exponent(
    name, largest, smallest_normal, smallest
):
    """The first four are OCP's, MX v1.0, section 5.3; torch has the first two fnuz."""
    format = format_named(name)
    assert format.max_value == largest
    assert 2.0**format.min_exponent == smallest_normal
    assert 2.0 ** (format.min_exponent - format.mantissa_bits) == smallest
    assert format.value_of(1) == smallest
    if hasattr(torch, f"float8_{name}"):
        info = torch.finfo(getattr(torch, f"float8_{name}"))
        assert (info.max, info.tiny) == (largest, smallest_normal)


def test_a_format_without_infinity_and_nan_saturates_by_any_of_its_names():
    assert format_named("e2m1").saturate
    assert format_named("e2m1-flush").saturate
    assert format_named("e2m1-saturate").saturate
    assert not format_named("e2m1-ieee").saturate
    assert not format_named("e4m3fnuz").saturate
    assert format_named("e4m3fnuz-saturate").encoding == "fnuz"


def test_a_name_says_its_format_and_two_endings():
    flush = format_named("e5m10-flush")
    assert (flush.exponent_bits, flush.mantissa_bits) == (5, 10)
    assert (flush.subnormals, flush.saturate, flush.infinities) == (False, False, True)
    both = format_named("e4m3-flush-saturate")
    assert (both.subnormals, both.saturate, both.infinities) == (False, True, False)
    assert both.name == "e4m3-flush-saturate"
    assert format_named("e8m7") == Format(name="e8m7", exponent_bits=8, mantissa_bits=7)


def test_e4m3_with_infinities_is_not_torchs():
    assert Format(name="ieee", exponent_bits=4, mantissa_bits=3).max_value == 240.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("bf61", r"format_named: name must be a known format or eXmY.*'bf61'; nearest: bf16"),
        ("fp16-saturate-flush", r"then -flush and -saturate if wanted, got 'fp16-saturate-flush'"),
        ("fp16-flush-flush", r"got 'fp16-flush-flush'"),
        ("fp16-trap", r"got 'fp16-trap'"),
        ("e05m3", r"got 'e05m3'; nearest: e5m2"),
        ("e5m", r"got 'e5m'; nearest: e5m2"),
        ("", r"got ''; nearest: fp64, fp32, tf32, bf16, fp16, e4m3, e5m2"),
        (None, r"got None; nearest: "),
        ("e1m3", r"Format: exponent_bits must be from 2 to 11, got 1 in 'e1m3'; FP64 is e11m52"),
        ("e12m3", r"exponent_bits must be from 2 to 11, got 12"),
        ("e5m0", r"Format: mantissa_bits must be from 1 to 52, got 0 in 'e5m0'"),
        ("e5m53", r"mantissa_bits must be from 1 to 52, got 53"),
        ("e5m2-ieee", r"got 'e5m2-ieee'; nearest: "),
        ("e3m4fnuz", r"got 'e3m4fnuz'; nearest: e5m2fnuz, e4m3fnuz"),
        ("e8m0", r"e8m0 holds the scales of blocks and no value is rounded to it.*such as mxfp8"),
        (
            "int8-flush",
            r"subnormals must be true in the encoding 'int', .*got False in 'int8-flush'",
        ),
    ],
)
def test_a_name_that_says_no_format_is_refused_with_the_nearest(name, message):
    with pytest.raises(ValueError, match=message):
        format_named(name)


def test_a_format_wider_than_fp64_is_refused():
    with pytest.raises(ValueError, match="exponent_bits must be from 1 to 10, got 11 in 'fn'"):
        Format(name="fn", exponent_bits=11, mantissa_bits=3, encoding="fn")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoding": "posit"}, "encoding must be one of ieee, fn, fnuz, finite, int, got 'posit'"),
        ({"encoding": "finite"}, "saturate must be true in the encoding 'finite', which has"),
        (
            {"bias": 130},
            r"bias must keep the exponents within FP32's, got 130 in 'x', .* from -129 to -116",
        ),
        ({"bias": -115}, "bias must keep the exponents within FP32's, got -115 in 'x'"),
    ],
)
def test_an_encoding_that_nothing_here_rounds_to_is_refused(changes, message):
    with pytest.raises(ValueError, match=f"Format: {message}"):
        Format(name="x", exponent_bits=4, mantissa_bits=3, **changes)


def test_a_pattern_longer_than_the_format_is_refused():
    with pytest.raises(
        ValueError, match="pattern must be from 0 to 15, the 4 bits of e2m1, got 16"
    ):
        format_named("e2m1").value_of(16)


@pytest.mark.parametrize("name", ["fp64", "fp32", "fp16"])
def test_the_patterns_at_both_ends_of_a_wide_format_have_values(name):
    """Those above 2 in FP64 too, whose distance from its smallest value no float holds."""
    format = format_named(name)
    infinity = (2**format.exponent_bits - 1) << format.mantissa_bits
    assert format.value_of(infinity - 1) == torch.finfo(DTYPES[name]).max
    assert format.value_of(infinity) == torch.inf
    assert math.isnan(format.value_of(infinity + 1))
    assert format.value_of(1) == 2.0 ** (format.min_exponent - format.mantissa_bits)


@pytest.mark.parametrize(
    ("narrow", "wide", "fits"),
    [
        ("fp16", "tf32", True),
        ("fp16", "bf16", False),  # mantissa
        ("bf16", "fp16", False),  # range
        ("e4m3", "fp16", True),
        ("e4m3", "e4m4", False),  # 448 is past 240 and a half
        ("e5m2", "fp16", True),
        ("bf16", "fp32", True),
        ("e8m15-flush", "fp32-flush", True),
        ("fp32", "fp32-flush", False),  # 2**-149
        ("e7m23", "fp32-flush", True),  # its smallest, 2**-85, is normal there
        ("e8m23-saturate", "fp32", True),
        ("e9m2", "fp32", False),
        ("fp64", "fp64", True),
    ],
)
def test_a_format_fits_a_wider_one_that_holds_all_its_values(narrow, wide, fits):
    assert format_named(narrow).fits(format_named(wide)) is fits


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("fp16", torch.float16),
        ("e4m3", torch.bfloat16),
        ("e5m2-saturate", torch.bfloat16),
        ("e2m1", torch.bfloat16),
        ("int8", torch.bfloat16),
        ("e5m2fnuz", torch.bfloat16),
        ("e5m8", torch.float16),
        ("e6m9", torch.float32),
        ("tf32", torch.float32),
        ("fp32", torch.float32),
        ("e9m2", torch.float64),
        ("fp64", torch.float64),
    ],
)
def test_an_operand_is_held_in_the_narrowest_dtype(name, dtype):
    format = format_named(name)
    assert format.container == INPUT_DTYPES[dtype]
    assert format.fits(FORMATS[format.container])
