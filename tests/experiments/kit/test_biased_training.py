"""Reruns repeat to the bit, arms differ by their bias alone, a signal is noticed if it lasts."""

import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

from experiments.kit.biased_training import (
    ARMS,
    Course,
    Recipe,
    explosion,
    first_bias,
    first_notice,
    load_blocks,
    noticed,
    signal_rows,
    train,
    with_bias,
)
from stability.config.schema import DataConfig, ModelConfig, OptimizerConfig

RECIPE = Recipe(
    model=ModelConfig(depth=2, width=32, heads=2, context=32),
    optimizer=OptimizerConfig(weight_decay=0.0, warmup_steps=2),
    batch_size=4,
    steps=5,
    probe_every=2,
)
CLEAN = [with_bias(0.0), with_bias(0.0)]


@pytest.fixture(scope="module")
def blocks(tmp_path_factory):
    # one text under every Python, whose own library is another one in each
    text = tmp_path_factory.mktemp("data") / "text.txt"
    text.write_text((Path(__file__).parents[3] / "LICENSE").read_text())
    return load_blocks(replace(RECIPE, data=DataConfig(source=str(text))))


def test_a_rerun_ends_in_the_same_figures_and_learns(blocks):
    first, second = (train(RECIPE, CLEAN, blocks, seed=3) for _ in range(2))
    assert first == second
    assert list(first.probed) == [0, 2, 4]
    assert len(first.losses) == 5
    assert first.losses[-1] < first.losses[0]
    assert "watch/layer_1/head_0/query_norm" in first.probed[2]


def test_looking_changes_nothing(blocks):
    looked, once = (
        train(replace(RECIPE, probe_every=every), CLEAN, blocks, seed=3) for every in (1, 100)
    )
    assert looked.losses == once.losses


def test_arms_of_a_seed_start_alike_and_other_seeds_do_not(blocks):
    clean = train(RECIPE, CLEAN, blocks, seed=3)
    biased = train(RECIPE, [CLEAN[0], with_bias(0.2)], blocks, seed=3)
    nudged = train(RECIPE, CLEAN, blocks, seed=3, nudge_ulps=1)
    other = train(RECIPE, CLEAN, blocks, seed=4)
    norm = "watch/layer_1/head_0/query_norm"
    assert biased.probed[0][norm] == clean.probed[0][norm]
    assert biased.probed[4][norm] != clean.probed[4][norm]
    assert nudged.probed[0][norm] == pytest.approx(clean.probed[0][norm], rel=1e-6)
    assert nudged.probed[0][norm] != clean.probed[0][norm]
    assert abs(other.losses[0] - clean.losses[0]) > 10 * abs(biased.losses[0] - clean.losses[0])


def test_a_bias_is_measured_where_it_is_injected(blocks):
    """Over four seeds: of one the measured bias has a standard error of 0.011."""
    once = replace(RECIPE, steps=1)
    arms = {"clean": CLEAN, "biased": [CLEAN[0], with_bias(0.2)]}
    mean = {
        (arm, layer): fmean(found[f"deviation/{layer}/out/bias_ulp"] for found in looks)
        for arm, attention in arms.items()
        for looks in [[train(once, attention, blocks, seed=s).probed[0] for s in range(3, 7)]]
        for layer in ("layer_0", "layer_1")
    }
    assert mean["clean", "layer_1"] == pytest.approx(0.0, abs=0.02)
    assert mean["biased", "layer_1"] == pytest.approx(0.19, abs=0.03)
    assert mean["biased", "layer_0"] == pytest.approx(0.0, abs=0.02)


def test_a_tokenizer_too_large_for_the_model_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least the 256"):
        load_blocks(replace(RECIPE, model=replace(RECIPE.model, vocab_size=100)))


GAPS = ("norm_gap", "loss_gap")


@pytest.fixture(scope="module")
def rows():
    return signal_rows(RECIPE, load_blocks(RECIPE), seed=0)


def test_each_arm_has_a_row_at_each_probed_step(rows):
    assert [(row["step"], row["arm"]) for row in rows] == [
        (step, arm) for step in (0, 2, 4) for arm in ARMS
    ]


def test_bias_is_in_the_biased_arm_alone_and_gaps_are_from_the_clean_one(rows):
    last = {row["arm"]: row for row in rows if row["step"] == 4}
    assert last["biased"]["bias_ulp"] == pytest.approx(0.19, abs=0.03)
    assert last["biased"]["bias"] > 1
    assert max(abs(last[arm]["bias_ulp"]) for arm in ("clean", "coin", "nudge")) < 0.03
    assert max(last[arm]["bias"] for arm in ("clean", "coin", "nudge")) < 1
    assert max(row["elsewhere"] for row in rows) < 1
    assert last["clean"]["norm_gap"] == last["clean"]["loss_gap"] == 0
    assert all(0 < last[arm][gap] < 1e-2 for arm in last if arm != "clean" for gap in GAPS)
    start = {row["arm"]: row["norm_gap"] for row in rows if row["step"] == 0}
    assert start["biased"] == start["coin"] == 0 < start["nudge"]


def test_ratios_are_to_the_nudge(rows):
    last = {row["arm"]: row for row in rows if row["step"] == 4}
    for name, gap in zip(("norm", "loss"), GAPS, strict=True):
        assert last["nudge"][name] == 1
        assert last["coin"][name] == last["coin"][gap] / last["nudge"][gap]


@pytest.mark.slow
def test_the_loss_gap_is_that_of_the_steps_since_the_last_look():
    blocks = load_blocks(RECIPE)
    every = signal_rows(replace(RECIPE, probe_every=1), blocks, seed=0)
    (two,) = (
        row["loss_gap"]
        for row in signal_rows(RECIPE, blocks, seed=0)
        if row["arm"] == "coin" and row["step"] == 4
    )
    single = {row["step"]: row["loss_gap"] for row in every if row["arm"] == "coin"}
    assert two == pytest.approx(math.sqrt((single[3] ** 2 + single[4] ** 2) / 2))


def test_a_signal_is_read_in_its_own_arm():
    rows = [
        {"arm": arm, "seed": seed, "step": step, "loss": value + 0.1 * seed}
        for arm, value in (("biased", 3.0), ("coin", 0.5))
        for step in range(4)
        for seed in range(5)
    ]
    assert noticed(rows, "biased", "loss") == 0
    assert noticed(rows, "coin", "loss") is None


def test_the_first_step_is_named_at_which_any_layer_is_biased():
    def looked(*biases):
        return {
            f"deviation/layer_{layer}/out/{name}": value
            for layer, bias in enumerate(biases)
            for name, value in (("bias_ulp", bias), ("bias_ulp_se", 0.01))
        }

    probed = {0: looked(0.04, 0.0), 10: looked(0.0, -0.06), 20: looked(0.2, 0.2)}
    assert first_bias(Course(losses=[], probed=probed), 2) == 10
    assert first_bias(Course(losses=[], probed={0: looked(0.04, -0.04)}), 2) is None


@pytest.mark.parametrize(
    ("losses", "step"),
    [
        ([5.0, 4.0, 3.0, 3.9, 2.0], None),
        ([5.0, 4.0, 3.0, 4.1, 2.0], 3),
        ([5.0, 4.0, math.nan], 2),
        ([5.0, math.inf], 1),
    ],
)
def test_a_loss_explodes_where_it_is_a_nat_above_its_least_or_no_number(losses, step):
    assert explosion(losses) == step


def _ratios(*by_step):
    """Ratios of five seeds, about the value given for each step."""
    return {
        10 * index: {seed: value * (1 + 0.05 * seed) for seed in range(5)}
        for index, value in enumerate(by_step)
    }


def test_first_of_three_looks_in_a_row_is_named():
    assert first_notice(_ratios(0.9, 8, 8, 8, 0.9, 0.9)) == 10


def test_a_chance_look_does_not_count():
    assert first_notice(_ratios(8, 8, 0.9, 8, 8, 0.9)) is None
    assert first_notice(_ratios(8, 0.9, 8, 8, 8, 8)) == 20


def test_a_ratio_about_one_is_never_noticed_whatever_a_single_seed_says():
    assert first_notice(_ratios(*[0.92] * 6)) is None
    scattered = {step: {**by_seed, 0: 0.1} for step, by_seed in _ratios(*[1.5] * 6).items()}
    assert first_notice(scattered) is None


def test_without_a_ratio_a_look_does_not_tell():
    ratios = _ratios(*[8] * 6)
    ratios[20][3] = math.nan
    assert first_notice(ratios) == 30
