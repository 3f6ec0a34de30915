"""A recipe is found by its name, and one that contradicts itself is refused."""

import pytest

from attention_kernels.block_recipes import BLOCK_RECIPES, BlockRecipe, recipe_named


def test_a_name_finds_its_recipe_and_a_rule_may_follow_those_of_mx_or_with_fp32_scales():
    assert all(recipe_named(name) is recipe for name, recipe in BLOCK_RECIPES.items())
    rceil = recipe_named("mxfp8-e5m2-rceil")
    assert (rceil.name, rceil.elements, rceil.rule) == ("mxfp8-e5m2-rceil", "e5m2", "rceil")
    row = recipe_named("fp8_per_row-ceil")
    assert (row.name, row.block, row.scales) == ("fp8_per_row-ceil", "row", "fp32")
    assert row.rule == "ceil"


@pytest.mark.parametrize("name", ["mxfp4-floor", "nvfp4-ceil", "mxfp4-max", "mxfp5", "e4m3", None])
def test_another_name_is_refused_with_the_nearest(name):
    with pytest.raises(ValueError, match=rf"name must be a block recipe, got {name!r}; nearest: "):
        recipe_named(name)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"elements": "e4m33x"}, "format_named: name must be a known format"),
        ({"scales": "bf16"}, "scales must be one of e8m0, e4m3, fp32, got 'bf16' in 'mine'"),
        ({"rule": "round"}, "rule must be one of max, floor, ceil, rceil, even, got 'round'"),
        ({"block": (0, 32)}, r"block must be \(rows, columns\), 'row' or 'tensor', got \(0, 32\)"),
        ({"block": "block"}, r"'row' or 'tensor', got 'block'"),
        ({"scales": "e8m0"}, "rule must be a power of two with e8m0 scales, got 'max'"),
        ({"scales": "e4m3", "rule": "ceil"}, "rule must be 'max' with e4m3 scales, got 'ceil'"),
        (
            {"rule": "floor", "largest_scale": 448.0},
            "rule must be 'max' with the scale of a tensor or with four_over_six, got 'floor'",
        ),
        ({"rotation": 24}, "rotation must be a power of two or 0, got 24"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        BlockRecipe(**{"name": "mine", "elements": "e4m3", "block": (1, 32)} | changes)


def test_every_published_recipe_has_the_block_and_the_scales_of_its_source():
    seen = {n: (r.elements, r.block, r.scales, r.rule) for n, r in BLOCK_RECIPES.items()}
    assert seen["mxfp8"] == ("e4m3", (1, 32), "e8m0", "floor")
    assert seen["mxfp4"] == ("e2m1", (1, 32), "e8m0", "floor")
    assert seen["nvfp4"] == ("e2m1", (1, 16), "e4m3", "max")
    assert seen["deepseek_1x128"] == ("e4m3", (1, 128), "fp32", "max")
    assert seen["deepseek_128x128"] == ("e4m3", (128, 128), "fp32", "max")
