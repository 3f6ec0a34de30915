"""The recipes of FP4 in a gradient and in a training: what is measured, at a size of seconds."""

import types

import pytest
import torch


def _planted(experiment, monkeypatch, errors):
    """Let a recipe's gradients be ones and the errors given, one a look."""
    given = iter(errors)
    keys = types.SimpleNamespace(step=0, call=1)
    drawn = []

    def of(weights, batch, role, is_isolated):
        drawn.append((keys.step, keys.call))
        return {"a": torch.ones(400) + next(given), "b": torch.ones(3, 200)}

    found = types.SimpleNamespace(keys=keys, of=of)
    monkeypatch.setattr(experiment, "_gradients", lambda *_: found)
    looks = [torch.empty(0)] * len(errors)
    exact = [torch.ones(1000, dtype=torch.float64)] * len(errors)
    quick = experiment.SIZES["quick"]
    error = experiment._gradient_error(quick, "recipe:nvfp4", 0, {}, looks, exact)
    return error, [(step - quick.steps, call) for step, call in drawn]


def test_an_error_that_never_changes_is_all_coherent(experiment, monkeypatch):
    found, drawn = _planted(experiment, monkeypatch, [torch.full((400,), 0.1)] * 5)
    # 400 of 1000 components are off by a tenth
    assert found["error"] == pytest.approx(0.1 * 0.4**0.5, rel=1e-6)
    assert found["coherent"] == pytest.approx(1, rel=1e-6)
    assert drawn == [(number, 0) for number in range(5)], "each look draws anew"


def test_an_error_that_turns_each_time_is_not(experiment, monkeypatch):
    signs = torch.linalg.qr(torch.randn(400, 5, generator=torch.Generator().manual_seed(0))).Q.T
    found, _ = _planted(experiment, monkeypatch, list(signs))
    assert found["coherent"] == pytest.approx(0, abs=1e-6)
    found, _ = _planted(experiment, monkeypatch, [signs[0] + 2 * each for each in signs[1:]])
    assert found["coherent"] == pytest.approx(1 / 5, abs=1e-6), "one part of five stays"


@pytest.mark.slow
def test_at_a_size_of_seconds_all_is_measured_and_a_rerun_is_equal(experiment):
    quick = experiment.SIZES["quick"]
    found, again = experiment.measure(quick), experiment.measure(quick)
    assert again.rows == found.rows
    recipes = list(experiment.RECIPES)
    assert [row["recipe"] for row in found.rows] == quick.seeds * recipes
    assert all(row["error"] > 0 and row["distance"] > 0 for row in found.rows)
    holds = {test.statement: test.decision for test in found.tests}
    assert holds["all four: the held-out loss is within 1.5 % of BF16's"] == "holds"
    assert holds["MXFP8: the gradient errs less than half as far as in NVFP4"] == "holds"
    assert len(experiment.draw(found.rows).axes) == 3
