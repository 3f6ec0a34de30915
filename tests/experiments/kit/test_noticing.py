"""The arms of a seed differ where they should, and their gaps are what they say."""

import math
from dataclasses import replace

import pytest

from experiments.kit.noticing import ARMS, explosion, first_bias, noticed, signal_rows
from experiments.kit.replay import Course, Recipe, load_blocks
from stability.config.schema import ModelConfig, OptimizerConfig

RECIPE = Recipe(
    model=ModelConfig(depth=2, width=32, heads=2, context=32),
    optimizer=OptimizerConfig(weight_decay=0.0, warmup_steps=2),
    batch_size=4,
    steps=5,
    probe_every=2,
)


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
