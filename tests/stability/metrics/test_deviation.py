"""Deviation metrics against independent formulas, and what makes them trustworthy."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.metrics.deviation import LAYER_COLUMNS, compare, deviation
from stability.metrics.golden_error import GOLDEN_COLUMNS, golden_tensor


def _pair(seed=0, shape=(2, 3, 5, 8)):
    generator = torch.Generator().manual_seed(seed)
    r = torch.randn(shape, generator=generator, dtype=torch.float64)
    return r + 0.01 * torch.randn(shape, generator=generator, dtype=torch.float64) + 0.002, r


def test_each_metric_is_its_formula():
    x, r = _pair()
    found = deviation(x, r, output_format="bf16")
    e, n = x - r, x.numel()
    floor = float(r.square().mean().sqrt()) / 16
    ulps = torch.tensor(
        [
            d / 2.0 ** (math.floor(math.log2(max(abs(v), floor))) - 7)
            for d, v in zip(e.flatten(), r.flatten(), strict=True)
        ],
        dtype=torch.float64,
    )
    expected = {
        "max_abs": float(e.abs().max()),
        "mean_abs": float(e.abs().mean()),
        "std": float(e.std(correction=0)),
        "rmse": float(e.square().mean().sqrt()),
        "rel_fro": float(e.norm() / r.norm()),
        "cosine": float(torch.cosine_similarity(x.flatten(), r.flatten(), dim=0)),
        "sqnr_db": 20 * math.log10(float(r.norm() / e.norm())),
        "bias": float(e.mean()),
        "bias_ulp": float(ulps.mean()),
        "bias_ulp_se": float(ulps.std(correction=0)) / n**0.5,
        "ulp_max": float(ulps.abs().max()),
        "nonfinite": 0.0,
    }
    assert tuple(expected) == LAYER_COLUMNS
    for metric, value in expected.items():
        assert found[metric] == pytest.approx(value, rel=1e-9), metric


def test_equal_tensors_deviate_by_exactly_nothing():
    x, _ = _pair()
    found = deviation(x, x.clone(), output_format="fp32")
    assert found.pop("cosine") == 1.0
    assert found.pop("sqnr_db") == math.inf
    assert set(found.values()) == {0.0}


def test_a_fifth_of_an_ulp_of_bias_shows_in_bias_ulp_alone():
    generator = torch.Generator().manual_seed(1)
    r = torch.rand(20_000, 1, generator=generator, dtype=torch.float64) + 1  # one binade
    noise = (torch.rand(r.shape, generator=generator, dtype=torch.float64) - 0.5) * 2.0**-7
    fair = deviation(r + noise, r, output_format="bf16")
    biased = deviation(r + 0.2 * 2.0**-7 + noise * 0.9, r, output_format="bf16")
    assert abs(fair["bias_ulp"]) < 3 * fair["bias_ulp_se"] < 0.01
    assert biased["bias_ulp"] == pytest.approx(0.2, abs=3 * biased["bias_ulp_se"])
    assert biased["bias_ulp"] > 50 * biased["bias_ulp_se"]
    assert biased["mean_abs"] < 1.3 * fair["mean_abs"]


def test_one_nan_is_counted_and_blanks_nothing():
    x, r = _pair()
    clean = deviation(x, r, output_format="bf16")
    x[0, 0, 0, 0], x[1, 2, 3, 4] = math.nan, math.inf
    found = deviation(x, r, output_format="bf16")
    assert found["nonfinite"] == 2
    assert found["rel_fro"] == pytest.approx(clean["rel_fro"], rel=0.1)
    assert all(math.isfinite(value) for value in found.values())


def test_padding_is_left_out():
    x, r = _pair()
    valid = torch.ones(2, 1, 5, dtype=torch.bool)
    valid[1, :, 3:] = False
    spoiled = x.clone()
    spoiled[1, :, 3:] = math.nan
    kept = torch.cat([x[0].reshape(-1, 8), x[1, :, :3].reshape(-1, 8)])
    kept_r = torch.cat([r[0].reshape(-1, 8), r[1, :, :3].reshape(-1, 8)])
    found = deviation(spoiled, r, output_format="bf16", valid=valid)
    expected = deviation(kept, kept_r, output_format="bf16")
    assert found == pytest.approx(expected, rel=1e-12)


@settings(max_examples=50)
@given(st.integers(0, 10_000), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_swapping_the_two_turns_the_bias_around(seed, dtype):
    x, r = (t.to(dtype) for t in _pair(seed))
    there = deviation(x, r, output_format="fp32")
    back = deviation(r, x, output_format="fp32")
    assert there["bias"] == -back["bias"]
    assert there["max_abs"] == back["max_abs"]


def test_error_ratio_is_flash_attns_measure():
    golden = torch.zeros(4, dtype=torch.float64) + 10
    baseline, candidate = golden + 1, golden - 3
    found = dict(
        zip(GOLDEN_COLUMNS, golden_tensor(candidate, baseline, golden).tolist(), strict=True)
    )
    ulp = 2.0**-49  # of FP64 at 10
    assert found == {
        "error_ratio": 3.0,
        "golden_candidate_rel_fro": pytest.approx(0.3),
        "golden_baseline_rel_fro": pytest.approx(0.1),
        "gain": pytest.approx(-0.3),
        "gain_baseline": pytest.approx(0.1),
        "golden_bias_ulp": pytest.approx(-3 / ulp),
        "golden_bias_ulp_baseline": pytest.approx(1 / ulp),
        "baseline_over_rounding": pytest.approx(12**0.5 / ulp),
        "golden_nonfinite": 0.0,
    }
    assert golden_tensor(golden, golden, golden).tolist() == [1.0, *[0.0] * 8]


def _golden_metrics(*tensors, **options):
    return dict(zip(GOLDEN_COLUMNS, golden_tensor(*tensors, **options).tolist(), strict=True))


def test_an_exact_baseline_makes_no_infinite_error_ratio():
    """In the first row under a causal mask P is 1: plain attention returns v itself."""
    golden = _pair()[1].bfloat16().double()
    baseline = golden.bfloat16()
    one_ulp = golden * (1 + 2.0**-7)
    found = _golden_metrics(one_ulp.bfloat16(), baseline, golden)
    assert 1 < found["error_ratio"] < 12**0.5 * 2
    assert _golden_metrics(baseline, one_ulp.bfloat16(), golden)["error_ratio"] == 0


def test_an_lse_is_judged_by_what_its_error_does_to_probabilities():
    """FA4's polynomial moves an FP32 LSE by 1e-4: thousands of its ULPs, nothing in BF16."""
    golden = 5 + torch.rand((2, 3, 40, 1), generator=torch.Generator().manual_seed(5)).double()
    baseline, candidate = golden.float(), (golden + 1e-4).float()
    at = len(LAYER_COLUMNS)
    own = compare(candidate, baseline, golden=golden).layer[at:].tolist()
    as_bf16 = compare(candidate, baseline, golden=golden, golden_ulp=2.0**-7).layer[at:].tolist()
    assert own[0] > 100
    assert as_bf16[0] == pytest.approx(1e-4 / 2**-7 * 12**0.5, rel=0.01)
    assert as_bf16[GOLDEN_COLUMNS.index("golden_bias_ulp")] == pytest.approx(0.0128, rel=0.01)


def test_a_factor_shows_in_the_gain_far_below_the_rounding_noise():
    generator = torch.Generator().manual_seed(3)
    golden = torch.randn((64, 512), generator=generator, dtype=torch.float64)
    baseline = golden.bfloat16()
    found = _golden_metrics((golden * 1.0005).bfloat16(), baseline, golden)
    assert found["gain"] == pytest.approx(5e-4, abs=5e-5)
    assert abs(found["gain_baseline"]) < 5e-5
    assert found["error_ratio"] < 1.1


def test_bias_is_of_each_against_the_golden_and_not_of_one_against_the_other():
    generator = torch.Generator().manual_seed(4)
    golden = torch.rand((64, 512), generator=generator, dtype=torch.float64) + 1  # one binade
    candidate, baseline = (golden + shift * 2.0**-7 for shift in (0.1, -0.1))
    found = _golden_metrics(candidate.bfloat16(), baseline.bfloat16(), golden)
    assert found["golden_bias_ulp"] == pytest.approx(0.1, abs=0.01)
    assert found["golden_bias_ulp_baseline"] == pytest.approx(-0.1, abs=0.01)


def test_padding_is_left_out_of_the_measures_against_the_golden():
    x, r = _pair()
    golden = r + 0.001
    valid = torch.ones(2, 1, 5, dtype=torch.bool)
    valid[1, :, 3:] = False
    spoiled = x.clone()
    spoiled[1, :, 3:] = math.nan
    found = _golden_metrics(spoiled, r, golden, valid=valid)
    wrong = _golden_metrics(x, r, golden)
    kept = [torch.cat([t[0].flatten(), t[1, :, :3].flatten()]) for t in (x, r, golden)]
    error, baseline_error = (float((t - kept[2]).norm()) for t in kept[:2])
    assert found["error_ratio"] == pytest.approx(error / baseline_error)
    assert wrong["error_ratio"] != pytest.approx(error / baseline_error)
    slope = float((kept[0] * kept[2]).sum() / kept[2].square().sum())
    assert found["gain"] == pytest.approx(slope - 1)
    with pytest.raises(ValueError, match="golden_tensor: valid must be bool and broadcast"):
        golden_tensor(x, r, golden, valid=valid[0, 0, :2])


def test_values_not_finite_where_the_goldens_are_count_against_the_candidate_alone():
    x, r = _pair()
    golden = r.clone()
    x[0, 0, 0, :2] = math.nan
    golden[0, 0, 0, 1] = math.inf  # the inputs overflow: whoever follows them is not to blame
    r[0, 1] = math.nan
    assert _golden_metrics(x, r, golden)["golden_nonfinite"] == 1


def test_other_shapes_are_refused():
    with pytest.raises(ValueError, match=r"one shape and hold values, got \(2, 3\), \(3, 2\)"):
        deviation(torch.zeros(2, 3), torch.zeros(3, 2), output_format="fp32")


def test_ulps_are_of_the_dtype_of_x_unless_a_format_is_named():
    x, r = (t.bfloat16() for t in _pair())
    assert deviation(x, r) == deviation(x, r, output_format="bf16")
    assert deviation(x, r)["ulp_max"] < deviation(x, r, output_format="fp32")["ulp_max"]


def test_equal_zeros_are_equal_and_a_zero_reference_has_no_direction():
    zero, one = torch.zeros(2, 3), torch.ones(2, 3)
    found = deviation(zero, zero)
    assert (found["cosine"], found["sqnr_db"], found["rel_fro"]) == (1.0, math.inf, 0.0)
    found = deviation(one, zero)
    assert (found["sqnr_db"], found["rel_fro"]) == (-math.inf, math.inf)
    assert math.isnan(found["cosine"])


def test_a_reference_that_is_not_finite_is_left_out_and_not_counted():
    x, r = _pair()
    r[0, 0, 0, 0] = math.inf
    found = deviation(x, r)
    assert found["nonfinite"] == 0
    assert all(math.isfinite(value) for value in found.values())


def test_with_nothing_to_compare_only_the_count_is_a_number():
    x = torch.full((2, 3), math.nan)
    found = deviation(x, torch.ones(2, 3))
    assert found.pop("nonfinite") == 6
    assert all(math.isnan(value) for value in found.values())
    against = golden_tensor(x, x, x)
    assert against[:-1].isnan().all()
    assert against[-1] == 0


def test_one_nan_does_not_blank_the_measures_against_the_golden():
    golden = torch.full((4,), 10.0)
    baseline, candidate = golden + 1, golden - 3
    candidate[2] = math.nan
    assert float(golden_tensor(candidate, baseline, golden)[0]) == pytest.approx(3)


def test_nothing_waits_for_the_device_or_branches_on_a_value():
    x = torch.empty(2, 3, 4, device="meta")  # holds no values: reading one raises
    valid = torch.empty(2, 1, dtype=torch.bool, device="meta")
    row = compare(x, x, output_format="bf16", valid=valid).layer
    assert (row.device.type, row.dtype, row.shape) == ("meta", torch.float64, (12,))
    assert golden_tensor(x, x, x, valid=valid).shape == (9,)


def test_autocast_and_gradients_leave_the_measures_alone():
    x, r = (t.float() for t in _pair())
    plain = deviation(x, r)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert deviation(x, r) == plain
    assert deviation(x.requires_grad_(), r) == plain


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"valid": torch.ones(3, dtype=torch.bool)}, r"valid must be bool .* \(2,\), got .*\(3,\)"),
        ({"valid": torch.ones(2)}, r"valid must be bool and broadcast .* got torch.float32"),
        ({"output_format": "bf61"}, "got 'bf61'; nearest: .*bf16"),
        ({"x": torch.ones(2, 3).int()}, "dtype must be one of .* got torch.int32"),
        ({"x": torch.ones(0, 3), "reference": torch.ones(0, 3)}, r"hold values, got \(0, 3\)"),
    ],
)
def test_what_cannot_be_compared_is_named(arguments, message):
    arguments = {"x": torch.ones(2, 3), "reference": torch.ones(2, 3), **arguments}
    with pytest.raises(ValueError, match=message):
        deviation(arguments.pop("x"), arguments.pop("reference"), **arguments)
