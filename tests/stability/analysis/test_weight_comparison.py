"""Weights are matched by name alone; what has no partner is listed with its reason."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file

from stability.analysis.weight_comparison import compare_weights
from stability.metrics.drift import drift
from stability.records.weight_files import open_weights


@pytest.fixture
def opened(tmp_path):
    """Return a function that writes states as files and opens them."""

    def write(*states):
        paths = [tmp_path / f"{name}.pt" for name, _ in zip("ab", states, strict=True)]
        for path, state in zip(paths, states, strict=True):
            torch.save(state, path)
        return [open_weights(path) for path in paths]

    return write


def _states():
    generator = torch.Generator().manual_seed(0)
    b = {name: torch.randn(6, 5, generator=generator) for name in ("h.0.w", "h.1.w", "head")}
    return {name: 1.01 * x for name, x in reversed(b.items())}, b


def test_what_both_sides_hold_is_compared_as_drift_does(opened):
    a, b = _states()
    found = compare_weights(*opened(a, b))
    assert found.drifts == drift(a, b)
    assert found.drifts["all"]["rel_l2"] == pytest.approx(0.01, rel=1e-5)
    assert found.a.endswith("a.pt")
    assert found.b.endswith("b.pt")
    assert found.only_in_a == found.only_in_b == ()
    assert found.shapes_differ == found.not_compared == {}


def test_every_other_name_is_listed_once_with_its_reason(opened):
    a, b = _states()
    extra_a = {
        "mine": torch.ones(1),
        "shape": torch.ones(2, 3),
        "count": torch.tensor(3),
        "wide": torch.ones(2),
        "none": torch.empty(0, 2),
        "grown": torch.empty(0, 2),
        "note": "text",
        "all": torch.ones(2),
        "my note": 1,
    }
    extra_b = {
        "yours": torch.ones(1),
        "shape": torch.ones(3, 2),
        "count": torch.tensor(3.0),
        "wide": torch.ones(2, dtype=torch.complex64),
        "none": torch.empty(0, 2),
        "grown": torch.ones(1, 2),
        "note": torch.ones(1),
        "all": torch.ones(2),
    }
    found = compare_weights(*opened(extra_a | a, b | extra_b))
    assert found.drifts == drift(a, b)
    assert found.only_in_a == ("mine", "my note")
    assert found.only_in_b == ("yours",)
    assert found.shapes_differ == {"shape": ((2, 3), (3, 2)), "grown": ((0, 2), (1, 2))}
    assert found.not_compared == {
        "count": "not floating-point: int64",
        "wide": "not floating-point: complex64",
        "none": "empty",
        "note": "no tensor with values: str",
        "all": "its name stands for all parameters pooled",
    }


def test_packed_formats_are_listed(tmp_path):
    a, b = _states()
    packed = torch.zeros(4, 2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    for name, state in (("a", a), ("b", b)):
        save_file(state | {"q": packed}, tmp_path / f"{name}.safetensors")
    found = compare_weights(*(open_weights(tmp_path / f"{name}.safetensors") for name in "ab"))
    assert found.not_compared == {"q": "not floating-point: float4_e2m1fn_x2"}


def test_a_comparison_is_json_even_where_numbers_are_not_finite(opened):
    a, b = (
        {"w": torch.ones(2), "n": torch.tensor([math.nan])},
        {"w": torch.zeros(2), "n": torch.ones(1)},
    )
    found = compare_weights(*opened(a | {"s": torch.ones(2)}, b | {"s": torch.ones(3)})).to_dict()
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["drift"]["w"]["rel_l2"] == "inf"
    assert found["drift"]["n"]["rel_l2"] == "nan"
    assert found["drift"]["w"]["mean_abs"] == 1.0
    assert found["shapes_differ"] == {"s": [[2], [3]]}


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (
            {"model.h.0.w": torch.ones(2)},
            {"x": torch.ones(2), "h.0.w": torch.ones(2)},
            r"share a parameter, got model.h.0.w on one side; nearest on the other: h.0.w$",
        ),
        (
            {"h.0.w": torch.ones(2, 3)},
            {"h.0.w": torch.ones(3, 3)},
            r"got h.0.w of shapes \(2, 3\) and \(3, 3\); compare runs of one model",
        ),
        ({"n": torch.tensor(1)}, {"n": torch.tensor(1)}, "got n: not floating-point: int64"),
    ],
)
def test_weights_that_share_nothing_are_refused_in_one_line(opened, a, b, message):
    with pytest.raises(ValueError, match=message) as refused:
        compare_weights(*opened(a, b))
    assert "a.pt and " in str(refused.value)
    assert "\n" not in str(refused.value)


def _tied(scale):
    generator = torch.Generator().manual_seed(0)
    weight = scale * torch.randn(6, 5, generator=generator)
    return {"emb": weight, "mid": torch.full((6, 5), scale), "head": weight}


def test_a_tied_weight_is_compared_once_and_what_stands_for_it_is_said(opened):
    a, b = _tied(1.01), _tied(1.0)
    found = compare_weights(*opened(a, b))
    assert found.tied == {"head": "emb"}
    assert found.to_dict()["tied"] == {"head": "emb"}
    kept = ("emb", "mid")
    assert found.drifts == drift({n: a[n] for n in kept}, {n: b[n] for n in kept})


def test_a_weight_that_is_tied_on_one_side_alone_is_compared_by_both_names(opened):
    b = _tied(1.0)
    found = compare_weights(*opened({**_tied(1.01), "head": 2 * b["head"]}, b))
    assert found.tied == {}
    assert {"emb", "head"} < found.drifts.keys()


def test_equal_bits_in_safetensors_are_one_weight_but_not_where_all_are_one_number(tmp_path):
    for name, scale in (("a", 1.01), ("b", 1.0)):
        state = {n: x.clone() for n, x in _tied(scale).items()}
        save_file({**state, "mid2": state["mid"].clone()}, tmp_path / f"{name}.safetensors")
    found = compare_weights(*(open_weights(tmp_path / f"{name}.safetensors") for name in "ab"))
    assert found.tied == {"head": "emb"}
