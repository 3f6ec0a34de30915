"""Drift: zero for equal weights, and each metric what an independent formula says."""

import pytest
import torch
from scipy.stats import wasserstein_distance

from stability.metrics.drift import DRIFT_METRICS, drift


def _states(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    b = {
        "wide": torch.randn(30, 7, generator=generator, dtype=dtype),
        "narrow": torch.rand(11, generator=generator, dtype=dtype) + 5,
    }
    a = {
        name: x + 0.3 * torch.randn(x.shape, generator=generator, dtype=dtype)
        for name, x in b.items()
    }
    return a, b


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_drift_of_equal_weights_is_exactly_zero(dtype):
    _, b = _states()
    b = {name: x.to(dtype) for name, x in b.items()}
    for values in drift({name: x.clone() for name, x in b.items()}, b).values():
        assert values == {m: 1.0 if m == "cosine" else 0.0 for m in DRIFT_METRICS}


@pytest.mark.parametrize("name", ["wide", "narrow", "all"])
def test_each_metric_is_its_formula(name):
    a, b = _states()
    found = drift(a, b)
    assert list(found) == ["all", "wide", "narrow"]
    names = ["wide", "narrow"] if name == "all" else [name]
    x, y = (torch.cat([s[n].flatten() for n in names]).double() for s in (a, b))
    expected = {
        "w1": wasserstein_distance(x, y),
        "w1_over_std": wasserstein_distance(x, y) / float(y.std(correction=0)),
        "mean_abs": float((x - y).abs().mean()),
        "max_abs": float((x - y).abs().max()),
        "rel_l2": float((x - y).norm() / y.norm()),
        "cosine": float(torch.cosine_similarity(x, y, dim=0)),
        "sign_flips": float(((x > 0) & (y < 0) | (x < 0) & (y > 0)).double().mean()),
    }
    assert tuple(expected) == DRIFT_METRICS
    for metric, value in expected.items():
        assert found[name][metric] == pytest.approx(value, rel=1e-9), metric
    assert found["wide"]["sign_flips"] > 0


def test_a_permutation_has_no_w1_but_a_distance():
    _, b = _states()
    a = {name: x.flip(0) for name, x in b.items()}
    assert drift(a, b)["wide"]["w1"] == 0.0
    assert drift(a, b)["wide"]["rel_l2"] > 1


def test_one_ulp_in_one_of_many_weights_is_seen():
    b = {"w": torch.ones(10_000)}
    a = {"w": torch.ones(10_000)}
    a["w"][77] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert drift(a, b)["all"]["max_abs"] == 2.0**-23
    assert drift(a, b)["all"]["rel_l2"] == pytest.approx(2.0**-23 / 100, rel=1e-12)


def test_a_constant_reference_has_an_infinite_ratio_not_an_error():
    zero = {"w": torch.zeros(4)}
    found = drift({"w": torch.ones(4)}, zero)["w"]
    assert found["w1_over_std"] == found["rel_l2"] == float("inf")


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "only one has: x, y"),
        ({}, {}, "at least one; only one has: none at all"),
        ({"x": torch.ones(2)}, {"x": torch.ones(3)}, r"x must have one shape .* \(2,\) and \(3,\)"),
        ({"x": torch.ones(2).int()}, {"x": torch.ones(2)}, "x must be floating-point, got .*int32"),
    ],
)
def test_what_cannot_be_compared_is_named(a, b, message):
    with pytest.raises(ValueError, match=message):
        drift(a, b)
