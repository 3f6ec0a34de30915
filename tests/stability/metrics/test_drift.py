"""Drift: zero for equal weights, and each metric what an independent formula says."""

import math
import sys
import weakref
from collections.abc import Mapping
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import wasserstein_distance

from stability.metrics.drift import drift, weights_of_both
from stability.records.metric_table import DRIFT_METRICS


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
    assert set(expected) == set(DRIFT_METRICS)
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
        ({"x": torch.ones(2)}, {"y": torch.ones(2)}, "only in state_a: x; only in state_b: y"),
        ({"all": torch.ones(2)}, {"all": torch.ones(2)}, 'none of them called "all"'),
        (
            {"layer.weigh2": torch.ones(2)},
            {"layer.weight": torch.ones(2)},
            r"nearest to layer.weigh2: layer.weight$",
        ),
        ({"x": torch.ones(0)}, {"x": torch.ones(0)}, r"hold values, got x \(0,\)"),
        ({}, {}, "state_b must hold parameters"),
        (
            {"x": torch.ones(2)},
            {"x": torch.ones(3)},
            r"one shape .* got x \(2,\) and \(3,\)",
        ),
        ({"x": torch.ones(2).int()}, {"x": torch.ones(2)}, "x must be floating-point, got .*int32"),
    ],
)
def test_what_cannot_be_compared_is_named(a, b, message):
    with pytest.raises(ValueError, match=message):
        drift(a, b)


def test_the_same_bits_do_not_drift_even_where_they_are_no_numbers():
    b = {"w": torch.tensor([1.0, float("nan"), float("inf")]), "v": torch.ones(2)}
    found = drift({name: x.clone() for name, x in b.items()}, b)
    assert found["all"]["max_abs"] == found["w"]["rel_l2"] == 0.0
    moved = drift({"w": b["w"].clone(), "v": 2 * b["v"]}, b)
    assert moved["w"]["max_abs"] == 0.0
    assert moved["v"]["max_abs"] == 1.0
    assert math.isnan(moved["all"]["max_abs"])


@pytest.mark.parametrize("where", [0, 1])
def test_a_nan_in_one_state_is_carried_into_all(where):
    a, b = _states()
    a[["wide", "narrow"][where]].view(-1)[3] = float("nan")
    found = drift(a, b)["all"]
    assert all(math.isnan(value) for metric, value in found.items() if metric != "sign_flips")


def test_a_nan_against_zeros_is_no_infinite_ratio():
    found = drift({"w": torch.tensor([1.0, math.nan])}, {"w": torch.zeros(2)})["w"]
    assert math.isnan(found["rel_l2"])
    assert math.isnan(found["w1_over_std"])


def test_the_two_zeros_are_equal_weights():
    found = drift({"w": torch.tensor([0.0, 1.0])}, {"w": torch.tensor([-0.0, 1.0])})["w"]
    assert found == {m: 1.0 if m == "cosine" else 0.0 for m in DRIFT_METRICS}
    found = drift({"w": torch.zeros(2)}, {"w": -torch.zeros(2)})["all"]
    assert found == {m: 1.0 if m == "cosine" else 0.0 for m in DRIFT_METRICS}


@settings(max_examples=30)
@given(st.integers(2, 300), st.floats(-1e3, 1e3), st.integers(0, 99), st.sampled_from([32, 64]))
def test_no_order_of_the_weights_changes_a_bit(size, offset, seed, bits):
    generator = torch.Generator().manual_seed(seed)
    dtype = {32: torch.float32, 64: torch.float64}[bits]
    b = offset + 1e-4 * torch.randn(size, generator=generator, dtype=dtype)
    a = b + 1e-5 * torch.randn(size, generator=generator, dtype=dtype)
    order = torch.randperm(size, generator=generator)
    whole = drift({"w": a}, {"w": b})
    assert whole["w"] == whole["all"]
    assert drift({"w": a[order]}, {"w": b[order]}) == whole
    cut = [x[order].tensor_split(3) for x in (a, b)]
    states = ({str(i): x for i, x in enumerate(parts) if x.numel()} for parts in cut)
    assert drift(*states)["all"] == whole["all"]


def test_a_spread_far_below_the_mean_keeps_its_digits():
    b = {"gain": 1000 + 1e-6 * torch.arange(100_000, dtype=torch.float64).sin()}
    found = drift({"gain": b["gain"] + 1e-3}, b)["gain"]
    std = float((b["gain"] - 1000).std(correction=0))
    assert found["w1_over_std"] == pytest.approx(1e-3 / std, rel=1e-6)
    constant = {"gain": torch.full((100_000,), 0.1)}
    assert drift({"gain": constant["gain"] + 1}, constant)["gain"]["w1_over_std"] == float("inf")


def test_layout_dtype_and_gradients_of_the_states_do_not_matter():
    a, b = _states()
    other = {
        "wide": torch.nn.Parameter(a["wide"].mT.contiguous().mT.double()),
        "narrow": a["narrow"].double(),
    }
    before = hash_of(other)
    assert drift(other, b) == drift(a, b)
    assert hash_of(other) == before


def hash_of(state):
    return [x.detach().clone().numpy().tobytes() for x in state.values()]


class _Loading(Mapping):
    """A mapping that loads each tensor when it is asked for, and knows how many are in memory."""

    live = most = 0

    def __init__(self, state):
        self._state = state

    def __getitem__(self, name):
        tensor = self._state[name]
        memory = tensor.flatten().view(torch.uint8).numpy().copy()
        _Loading.live += 1
        _Loading.most = max(_Loading.most, _Loading.live)
        weakref.finalize(memory, self._forget)  # when the last view of it is gone
        return torch.from_numpy(memory).view(tensor.dtype).view(tensor.shape)

    def __iter__(self):
        return iter(self._state)

    def __len__(self):
        return len(self._state)

    @staticmethod
    def _forget():
        _Loading.live -= 1


def _layers(dtype):
    generator = torch.Generator().manual_seed(1)
    b = {f"h.{i}": torch.randn(40, 9, generator=generator, dtype=dtype) for i in range(20)}
    b["gain"] = torch.ones(300, dtype=dtype)
    a = {
        name: x + 1e-3 * torch.randn(x.shape, generator=generator, dtype=dtype)
        for name, x in b.items()
    }
    return a, b | {"h.3": a["h.3"].clone()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_model_beyond_the_memory_drifts_alike_with_one_pair_loaded_at_a_time(dtype):
    a, b = _layers(dtype)
    expected = drift(a, b)
    _Loading.most = 0
    with mock.patch.object(sys.modules["stability.metrics.drift"], "HELD", 1000):
        found = drift(_Loading(a), _Loading(b))
    assert list(found) == list(expected)
    assert found == expected
    assert _Loading.most == 2
    assert _Loading.live == 0


def test_drift_is_over_the_weights_of_both_where_one_state_has_more():
    one = {"b": torch.ones(2), "added": torch.full((9,), 7.0), "a": torch.zeros(3)}
    other = {"a": torch.ones(3), "gone": torch.ones(1), "b": torch.ones(2)}
    both = weights_of_both(one, other)
    assert [list(state) for state in both] == [["a", "b"], ["a", "b"]]
    assert drift(*both) == drift(
        {"a": torch.zeros(3), "b": torch.ones(2)}, {"a": torch.ones(3), "b": torch.ones(2)}
    )
    with pytest.raises(ValueError, match="state_b must hold parameters"):
        drift(*weights_of_both({"a": torch.ones(1)}, {"b": torch.ones(1)}))
