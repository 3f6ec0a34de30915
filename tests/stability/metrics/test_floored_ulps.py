"""ULPs against the formats' own neighbours."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.formats import FORMATS
from attention_kernels.rounding import DTYPES
from stability.metrics.ulp import to_ulps_
from tests.stability.metrics.floored_ulps import ulp_size


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_ulp_size_is_the_gap_to_the_next_value_for_every_pattern(name):
    dtype = DTYPES[name]
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = patterns[torch.isfinite(patterns)]
    gaps = values[1:].double() - values[:-1].double()
    assert torch.equal(ulp_size(values[:-1], name), gaps)
    assert torch.equal(ulp_size(-values[:-1], name), gaps)


@settings(max_examples=200)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_ulp_size_of_fp32_is_nextafters(value):
    x = torch.tensor(value, dtype=torch.float32).abs()
    above = torch.nextafter(x, torch.tensor(torch.inf))
    if torch.isfinite(above):
        assert float(ulp_size(x, "fp32")) == float(above.double() - x.double())


@settings(max_examples=200)
@given(st.floats(min_value=0, allow_nan=False, allow_infinity=False))
def test_ulp_size_of_fp64_is_nextafters(value):
    above = math.nextafter(value, math.inf)
    if math.isfinite(above):
        size = ulp_size(torch.tensor([value, -value], dtype=torch.float64), "fp64")
        assert size.tolist() == [above - value] * 2


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_ulp_size_of_8_bits_is_the_gap_to_the_next_value_for_every_pattern(name):
    dtype = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}[name]
    values = torch.arange(128, dtype=torch.uint8).view(dtype).double()
    values = values[torch.isfinite(values)]
    gaps = values[1:] - values[:-1]
    assert torch.equal(ulp_size(values[:-1], name), gaps)
    # an error of one gap is one ULP
    floor = torch.zeros((), dtype=torch.float64)
    ulps = to_ulps_(gaps.clone(), values[:-1], floor, FORMATS[name])
    assert torch.equal(ulps, torch.ones_like(gaps))
    narrow = to_ulps_(gaps.float(), values[:-1].float(), floor, FORMATS[name])
    assert torch.equal(narrow, torch.ones_like(gaps, dtype=torch.float32))


@pytest.mark.parametrize(
    ("name", "spacing"), [("fp16", 32.0), ("bf16", 2.0**120), ("e4m3", 32.0), ("e5m2", 8192.0)]
)
def test_beyond_the_largest_value_the_spacing_is_the_one_below_it(name, spacing):
    x = torch.tensor([FORMATS[name].max_value, 1e300], dtype=torch.float64)
    assert ulp_size(x, FORMATS[name]).tolist() == [spacing] * 2


def test_what_is_no_number_has_no_spacing():
    x = torch.tensor([math.nan, math.inf, -math.inf])
    assert ulp_size(x, "bf16").isnan().all()


def test_an_unknown_format_is_refused():
    with pytest.raises(ValueError, match=r"got 'bf61'; nearest: .*bf16"):
        ulp_size(torch.ones(1), "bf61")
