"""The bias of ties, its absence without them, and who sees a bias in training; in seconds."""

from dataclasses import replace
from pathlib import Path

import pytest

from experiments.kit.biased_training import load_blocks, noticed, train
from experiments.kit.runner import load
from stability.config.convert import to_dict
from stability.config.load import read_mapping
from stability.report.paper.style import paper_style

pytestmark = pytest.mark.slow  # the experiment itself takes ten seconds

FOLDER = Path(__file__).parents[2] / "experiments"


@pytest.fixture(scope="module")
def found():
    """One run for all tests of this file."""
    experiment = load(FOLDER, "biased_rounding")
    return experiment, experiment.measure(experiment.SIZES["quick"])


def _mean(rows, case, points, figure="bias_ulp"):
    values = [row[figure] for row in rows if row.get("case") == case and row["points"] == points]
    assert len(values) == 5
    return sum(values) / 5


def test_each_statement_holds(found):
    _, findings = found
    assert not [test.found for test in findings.tests if not test.holds]
    assert sum(not test.control for test in findings.tests) == 9


def test_bias_has_the_sign_of_v_and_goes_with_each_cure(found):
    _, findings = found
    rows = findings.rows
    for points, size in (("P v", 0.202), ("P, P v, O", 0.25)):
        assert _mean(rows, "two ones, v > 0", points) == pytest.approx(size, abs=0.02)
        assert _mean(rows, "two ones, v < 0", points) == pytest.approx(-size, abs=0.02)
        for cured in ("P v in FP32", "P v, O in FP32", "beta 2", "beta 7", "a single one"):
            assert abs(_mean(rows, cured, points)) < 0.02
    # the carrier: delta has it too, and not where it is summed from P
    assert _mean(rows, "two ones, v < 0", "P, P v, O", "delta_ulp") < -0.2
    assert abs(_mean(rows, "two ones, v < 0", "P, P v, O", "delta_from_p_ulp")) < 1e-3


def test_a_bias_in_one_layer_is_told_by_bias_ulp_alone_from_the_first_step(found):
    _, findings = found
    rows = [row for row in findings.rows if row["part"] == "training"]
    assert {row["arm"] for row in rows if row["bias"] > 1} == {"biased"}
    assert min(row["bias"] for row in rows if row["arm"] == "biased") > 1
    assert max(row["elsewhere"] for row in rows) < 1
    assert "bias_ulp tells from step 0" in findings.measured


def test_figure_names_its_axes_and_marks_the_first_step(found):
    experiment, findings = found
    with paper_style():
        upper, lower = experiment.draw(findings.rows).axes
    assert "ULP of BF16" in upper.get_xlabel()
    assert [label.get_text() for label in upper.get_yticklabels()][:2] == [
        "two ones, v > 0",
        "two ones, v < 0",
    ]
    assert lower.get_xlabel().startswith("step;")
    assert lower.get_yscale() == "log"
    marks = [line.get_xdata() for line in lower.get_lines() if line.get_marker() == "v"]
    rows = [row for row in findings.rows if row["part"] == "training"]
    steps = {signal: noticed(rows, "biased", signal) for signal in experiment.SIGNALS}
    assert steps["bias"] == 0
    # of the others it depends on the text, this Python's own library, whether and when they tell
    told = [step for step in steps.values() if step is not None]
    assert [step for mark in marks for step in mark] == told
    assert told.count(0) == 1


def test_gpu_size_is_the_published_recipe_and_its_code_path_runs(found, monkeypatch):
    experiment, _ = found
    trained = []

    def spying(recipe, attention, blocks, *, seed):
        trained.extend(each.description["numerics"] for each in attention)
        return train(recipe, attention, blocks, seed=seed)

    monkeypatch.setattr(experiment, "train", spying)
    gpu = experiment.SIZES["gpu"]
    preset = read_mapping(FOLDER.parent / "configs" / "model" / "gpt2_small.yaml")
    assert {**to_dict(gpu.recipe.model), **preset} == to_dict(gpu.recipe.model)
    chosen = gpu.recipe.optimizer
    assert (chosen.lr, chosen.betas, chosen.weight_decay) == (1e-3, (0.9, 0.95), 0.0)
    recipe = replace(experiment.ON_QUICK, optimizer=chosen)
    tiny = replace(gpu, recipe=recipe, seeds=1, failing_steps=3)
    rows = list(experiment._failing(tiny, load_blocks(recipe)))
    assert [(row["beta"], row["explodes"]) for row in rows] == [(1, None), (7, None)]
    assert [each["repeated_max_beta"] for each in trained] == [1, 1, 7, 7]
    assert {each["accumulator"] for each in trained} == {"bf16"}
    explodes, calm = experiment._on_failing(rows)
    assert not explodes.holds
    assert calm.holds
    explodes, calm = experiment._on_failing([{**row, "explodes": 2} for row in rows])
    assert explodes.holds
    assert not calm.holds
