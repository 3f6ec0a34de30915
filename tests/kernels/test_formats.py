"""Each grid is right: at every value, every midpoint and its two neighbours, and out of range."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels.formats import FORMATS, format_named, round_into, round_to

NARROW = ["bf16", "fp16"]


def positive_grid(name: str) -> torch.Tensor:
    """Every finite value >= 0 of a 16-bit format, ascending, in FP64: its bit patterns in order."""
    bits = torch.arange(2**15, dtype=torch.int16)
    values = bits.view(format_named(name).dtype).double()
    return values[torch.isfinite(values)]


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("name", NARROW)
def test_fp64_midpoints_go_to_the_even_neighbour_and_their_neighbours_to_the_near_one(name, sign):
    grid = positive_grid(name)
    low, high = sign * grid[:-1], sign * grid[1:]
    middle = (low + high) / 2
    even = torch.where(torch.arange(len(low)) % 2 == 0, low, high)
    assert torch.equal(round_to(middle, name), even)
    assert torch.equal(round_to(torch.nextafter(middle, low), name), low)
    assert torch.equal(round_to(torch.nextafter(middle, high), name), high)


@pytest.mark.parametrize("name", NARROW)
def test_values_on_the_grid_stay_from_both_carriers(name):
    grid = positive_grid(name)
    assert torch.equal(round_to(grid, name), grid)
    assert torch.equal(round_to(grid.float(), name), grid.float())


@pytest.mark.parametrize("name", NARROW)
def test_rounding_from_fp32_is_torchs_cast(name):
    generator = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31 - 1, (200_000,), generator=generator, dtype=torch.int64)
    x = bits.to(torch.int32).view(torch.float32)
    x = x[torch.isfinite(x)]
    cast = x.to(format_named(name).dtype).float()
    assert torch.equal(round_to(x, name), cast)
    assert torch.equal(round_to(x.double(), name), cast.double())


def test_rounding_from_fp64_to_fp16_is_numpys_single_rounding():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100_000, dtype=torch.float64, generator=generator) * 100
    x = torch.cat([x, x * 1e-7])
    expected = torch.from_numpy(x.numpy().astype(np.float16).astype(np.float64))
    assert torch.equal(round_to(x, "fp16"), expected)


@pytest.mark.parametrize("name", NARROW)
def test_past_the_largest_value_half_a_spacing_decides_between_it_and_infinity(name):
    largest = format_named(name).max_value
    spacing = largest - positive_grid(name)[-2].item()
    edge = torch.tensor([largest + spacing / 2, -largest - spacing / 2], dtype=torch.float64)
    inside = torch.nextafter(edge, torch.zeros_like(edge))
    assert round_to(edge, name).tolist() == [torch.inf, -torch.inf]
    assert round_to(inside, name).tolist() == [largest, -largest]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_infinities_nans_and_signed_zeros_survive(name, dtype):
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0], dtype=dtype)
    rounded = round_to(x, name)
    assert rounded.dtype == dtype
    torch.testing.assert_close(rounded, x, rtol=0, atol=0, equal_nan=True)
    assert rounded.signbit()[-2:].tolist() == [False, True]


@settings(deadline=None, max_examples=200)
@given(
    value=st.floats(allow_nan=False, allow_infinity=False),
    name=st.sampled_from(list(FORMATS)),
)
def test_rounding_twice_is_rounding_once(value, name):
    x = torch.tensor([value], dtype=torch.float64)
    once = round_to(x, name)
    assert torch.equal(round_to(once, name), once)


def test_a_format_as_wide_as_the_carrier_is_no_copy():
    x = torch.ones(3)
    assert round_to(x, "fp32") is x
    assert round_to(x, "fp64") is x


def test_fp64_input_enters_an_fp32_carrier_rounded_once():
    twice_wrong = torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64)
    entered = round_into(twice_wrong, "bf16", torch.float32)
    assert entered.dtype == torch.float32
    assert entered.item() == 1 + 2**-7
    assert round_into(twice_wrong, "bf16", torch.bfloat16).item() == 1 + 2**-7


def test_an_unknown_format_is_answered_with_the_nearest():
    with pytest.raises(ValueError, match=r"format_named: name must be .*'bf61'; nearest: bf16"):
        round_to(torch.ones(1), "bf61")


def test_a_narrow_carrier_is_refused():
    with pytest.raises(ValueError, match=r"round_to: x must be float32 or float64, got .*bfloat16"):
        round_to(torch.ones(1, dtype=torch.bfloat16), "bf16")
