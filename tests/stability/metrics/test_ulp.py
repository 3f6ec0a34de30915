"""ULPs against the formats' own neighbours."""

import pytest
import torch
from attention_kernels.formats import FORMATS
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.ulp import signed_ulp_error, ulp_distance, ulp_size


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_ulp_size_is_the_gap_to_the_next_value_for_every_pattern(name):
    dtype = FORMATS[name].dtype
    patterns = torch.arange(2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    values = patterns[torch.isfinite(patterns)]
    gaps = values[1:].double() - values[:-1].double()
    assert torch.equal(ulp_size(values[:-1], name), gaps)
    assert torch.equal(ulp_size(-values[:-1], name), gaps)


@settings(deadline=None, max_examples=200)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_ulp_size_of_fp32_is_nextafters(value):
    x = torch.tensor(value, dtype=torch.float32).abs()
    above = torch.nextafter(x, torch.tensor(torch.inf))
    if torch.isfinite(above):
        assert float(ulp_size(x, "fp32")) == float(above.double() - x.double())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_ulp_distance_counts_values_across_zero(dtype):
    tiny = torch.nextafter(torch.zeros((), dtype=dtype), torch.ones((), dtype=dtype))
    a = torch.stack([tiny, -tiny, 0 * tiny, tiny])
    b = torch.stack([-tiny, -0.0 * tiny, -0.0 * tiny, tiny])
    assert ulp_distance(a, b).tolist() == [2, 1, 0, 0]


def test_signed_error_is_positive_when_x_is_larger():
    reference = torch.tensor([1.0, -1.0])
    x = reference + 0.25 * 2.0**-7
    assert signed_ulp_error(x, reference, "bf16").tolist() == [0.25, 0.25]


def test_mixed_dtypes_are_refused():
    with pytest.raises(
        ValueError, match=r"one floating dtype, got torch.float32 and torch.float64"
    ):
        ulp_distance(torch.zeros(1), torch.zeros(1, dtype=torch.float64))
