"""The plain loop repeats to the bit, and two arms differ by what was changed alone."""

from dataclasses import replace

import pytest

from experiments.kit.injected_bias import injected_bias
from experiments.kit.replay import Recipe, load_blocks, train
from stability.config.schema import ModelConfig, OptimizerConfig

RECIPE = Recipe(
    model=ModelConfig(depth=2, width=32, heads=2, context=32),
    optimizer=OptimizerConfig(weight_decay=0.0, warmup_steps=2),
    batch_size=4,
    steps=5,
    probe_every=2,
)
CLEAN = [injected_bias(0.0), injected_bias(0.0)]


@pytest.fixture(scope="module")
def blocks():
    return load_blocks(RECIPE)


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
    biased = train(RECIPE, [CLEAN[0], injected_bias(0.2)], blocks, seed=3)
    nudged = train(RECIPE, CLEAN, blocks, seed=3, nudge_ulps=1)
    other = train(RECIPE, CLEAN, blocks, seed=4)
    norm = "watch/layer_1/head_0/query_norm"
    assert biased.probed[0][norm] == clean.probed[0][norm]
    assert biased.probed[4][norm] != clean.probed[4][norm]
    assert nudged.probed[0][norm] == pytest.approx(clean.probed[0][norm], rel=1e-6)
    assert nudged.probed[0][norm] != clean.probed[0][norm]
    assert abs(other.losses[0] - clean.losses[0]) > 10 * abs(biased.losses[0] - clean.losses[0])
    assert clean.probed[0]["deviation/layer_1/out/bias_ulp"] == pytest.approx(0.0, abs=0.02)
    assert biased.probed[0]["deviation/layer_1/out/bias_ulp"] == pytest.approx(0.19, abs=0.03)
    assert biased.probed[0]["deviation/layer_0/out/bias_ulp"] == pytest.approx(0.0, abs=0.02)


def test_a_tokenizer_too_large_for_the_model_is_refused():
    with pytest.raises(ValueError, match="vocab_size must be at least the 256"):
        load_blocks(replace(RECIPE, model=replace(RECIPE.model, vocab_size=100)))
