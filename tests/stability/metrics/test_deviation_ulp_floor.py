"""ULPs next to zero: what the floor mends, and what it must leave as it was."""

import math
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from attention_kernels import PROFILES, flash_attention, golden_attention
from stability.metrics import golden_error, result_sums
from stability.metrics.deviation import (
    LAYER_COLUMNS,
    PART_COLUMNS,
    compare,
    deviation,
    position_ranges,
)
from tests.stability.metrics.floored_ulps import (
    bias_and_error,
    floored_ulps,
    signed_ulp_error,
    ulp_size,
)

IN_ULPS = ("bias_ulp", "bias_ulp_se", "ulp_max")
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def _pair(shape=(2, 3, 12, 16), dtype=torch.float32, seed=0):
    """Return values of which a third is next to zero, in heads of unequal size."""
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(shape, generator=generator, dtype=torch.float64)
    r *= 2.0 ** -torch.arange(0, 2 * shape[1], 2).view(-1, 1, 1)
    r[torch.rand(shape, generator=generator) < 1 / 3] *= 1e-4
    e = 0.01 * torch.randn(shape, generator=generator, dtype=torch.float64) + 0.002
    return (r + e).to(dtype), r.to(dtype)


@pytest.mark.parametrize("output_format", ["bf16", "fp16", "fp32", "fp64"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_ulps_are_those_of_the_plain_definition(dtype, output_format):
    x, r = _pair(dtype=dtype)
    expected = floored_ulps(x, r, output_format)
    found = deviation(x, r, output_format=output_format)
    assert (found["bias_ulp"], found["bias_ulp_se"]) == pytest.approx(
        bias_and_error(expected), rel=1e-9
    )
    assert found["ulp_max"] == pytest.approx(abs(expected).max(), rel=1e-12)


@settings(max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(-60, 60), st.sampled_from([torch.float32, torch.float64])
)
def test_a_power_of_two_times_both_changes_no_ulp(seed, power, dtype):
    x, r = _pair(dtype=dtype, seed=seed)
    plain = deviation(x, r, output_format="bf16")
    scaled = deviation(x * 2.0**power, r * 2.0**power, output_format="bf16")
    assert [scaled[name] for name in IN_ULPS] == [plain[name] for name in IN_ULPS]


@settings(max_examples=40)
@given(
    heads=st.integers(1, 4),
    length=st.integers(1, 20),
    positions=st.integers(1, 5),
    chunk=st.sampled_from([1, 50, 2**17]),
    seed=st.integers(0, 10_000),
)
def test_biases_of_parts_add_up_to_the_layers(heads, length, positions, chunk, seed):
    x, r = _pair((2, heads, length, 16), seed=seed)
    ranges = [len(rows) for rows in position_ranges(length, positions)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_sums, "CHUNK", chunk)
        found = compare(x, r, output_format="bf16", heads=True, positions=positions)
    whole = found.layer[LAYER_COLUMNS.index("bias_ulp")].item()
    column = PART_COLUMNS.index("bias_ulp")
    assert found.heads[:, column].mean().item() == pytest.approx(whole, rel=1e-9, abs=1e-9)
    weights = torch.tensor(ranges, dtype=torch.float64) / length
    total = (weights * found.positions[:, column]).sum().item()
    assert total == pytest.approx(whole, rel=1e-9, abs=1e-9)


def test_a_planted_bias_of_values_of_normal_size_is_found_as_before():
    generator = torch.Generator().manual_seed(3)
    r = torch.randn(64, 500, generator=generator, dtype=torch.float64)
    r = torch.where(r.abs() < 0.1, r.sign(), r)  # all above the floor
    ulp = ulp_size(r, "bf16")
    noise = torch.rand(r.shape, generator=generator, dtype=torch.float64) - 0.5
    x = r + (0.3 + noise) * ulp
    found = deviation(x, r, output_format="bf16")
    assert found["bias_ulp"] == pytest.approx(0.3, abs=3 * found["bias_ulp_se"])
    assert found["bias_ulp_se"] < 0.002
    old = signed_ulp_error(x, r, "bf16")
    assert found["bias_ulp"] == pytest.approx(old.mean().item(), rel=1e-12)


@pytest.mark.parametrize("profile", ["fa2", "all_bf16"])
def test_dq_of_a_causal_attention_shows_its_bias_beside_values_that_cancel(profile):
    """At the first position dq is 0, at the second wherever both keys are equal in a component."""
    generator = torch.Generator().manual_seed(1)
    *qkv, dout = torch.randn(4, 8, 8, 16, 64, generator=generator).bfloat16()
    golden = _dq(golden_attention, [x.double() for x in qkv], dout)
    assert golden[:, :, 0].abs().max() < 1e-15 < 1e-3 < golden.square().mean().sqrt()
    dq = _dq(flash_attention, qkv, dout, numerics=PROFILES[profile], engine="twin")
    assert signed_ulp_error(dq, golden, "bf16").mean().abs() > 1e10
    found = deviation(dq, golden)
    assert abs(found["bias_ulp"]) < 0.1
    ulps = floored_ulps(dq, golden, "bf16")
    expected = pytest.approx(bias_and_error(ulps), rel=1e-9)
    assert (found["bias_ulp"], found["bias_ulp_se"]) == expected


def _dq(attention, qkv, dout, **options):
    leaves = [x.detach().requires_grad_() for x in qkv]
    out = attention(*leaves, causal=True, **options)
    return torch.autograd.grad(out, leaves[0], dout.to(out.dtype))[0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_reference_of_zeros_has_the_ulps_of_the_smallest_subnormal(dtype):
    zero = torch.zeros(2, 3, 4, 16, dtype=dtype)
    for format, smallest in (("bf16", 2.0**-133), ("fp16", 2.0**-24)):
        x = zero.double() + 3 * smallest
        assert deviation(x, zero, output_format=format)["bias_ulp"] == 3.0
    assert deviation(zero, zero)["bias_ulp"] == 0.0


def test_what_is_not_valid_or_not_finite_does_not_set_the_floor():
    x, r = _pair()
    expected = deviation(x[:, :, :9], r[:, :, :9], output_format="bf16")
    valid = torch.zeros(2, 1, 12, dtype=torch.bool)
    valid[..., :9] = True
    r[:, :, 9:] = 1e30
    found = deviation(x, r, output_format="bf16", valid=valid)
    assert [found[name] for name in IN_ULPS] == [expected[name] for name in IN_ULPS]
    r[:, :, 9] = math.nan
    r[:, :, 10:] = math.inf
    for mask in (None, valid):
        found = deviation(x, r, output_format="bf16", valid=mask)
        assert [found[name] for name in IN_ULPS] == [expected[name] for name in IN_ULPS]


def test_the_floor_is_the_references_alone():
    x, r = _pair()
    spoiled = x.clone()
    spoiled[0] = math.nan
    r[0] *= 2.0**9
    found, whole = (deviation(t, r, output_format="bf16") for t in (spoiled, x))
    ulps = floored_ulps(x, r, "bf16")
    assert whole["bias_ulp"] == pytest.approx(ulps.mean(), rel=1e-9)
    assert found["bias_ulp"] == pytest.approx(ulps[1].mean(), rel=1e-9)


def test_a_device_where_no_branch_may_look_finds_the_same(monkeypatch):
    x, r = _pair()
    r[0, 0, 0, :3] = torch.tensor([math.nan, math.inf, 3.0])
    valid = torch.ones(2, 1, 12, dtype=torch.bool)
    valid[0, 0, 3:5] = False
    here = compare(x, r, output_format="bf16", valid=valid, heads=True)
    # the package has a function of the module's name
    for module in (sys.modules["stability.metrics.deviation"], golden_error):
        monkeypatch.setattr(module, "all_finite", lambda sums: False)
    there = compare(x, r, output_format="bf16", valid=valid, heads=True)
    assert there.layer[LAYER_COLUMNS.index("bias_ulp")].isfinite()
    for name in ("layer", "heads", "histogram"):
        torch.testing.assert_close(getattr(there, name), getattr(here, name), rtol=1e-12, atol=0)
