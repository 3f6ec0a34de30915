"""A recipe of linear layers is found by its name, and one that contradicts itself is refused."""

from dataclasses import replace

import pytest

from attention_kernels.linear_recipes import (
    LINEAR_RECIPES,
    LinearOperand,
    LinearProduct,
    linear_recipe_named,
)

NVFP4 = LINEAR_RECIPES["nvfp4"]


def test_a_name_finds_its_recipe_and_another_is_refused_with_the_nearest():
    assert all(linear_recipe_named(name) is recipe for name, recipe in LINEAR_RECIPES.items())
    with pytest.raises(ValueError, match=r"got 'nvpf4'; nearest: nvfp4, "):
        linear_recipe_named("nvpf4")
    with pytest.raises(ValueError, match=r"got 'x'; nearest: nvfp4, .*, mxfp8, deepseek_v3"):
        linear_recipe_named("x")


def test_gradients_alone_are_rounded_stochastically_and_wgrad_alone_is_rotated_in_nvfp4():
    drawn = {place for place, each in NVFP4.operands() if each.rounding == "stochastic"}
    assert drawn == {"dgrad.left", "wgrad.left"}
    turned = {place: each.rotation for place, each in NVFP4.operands() if each.rotation}
    assert turned == {"wgrad.left": 16, "wgrad.right": 16}
    for name in ("mxfp8", "deepseek_v3", "deepseek_v3_pow2", "fp8_current", "nvfp4_nearest"):
        roundings = {each.rounding for _, each in LINEAR_RECIPES[name].operands()}
        assert roundings == {"nearest_even"}


@pytest.mark.parametrize(
    ("changes", "differ"),
    [
        ("nvfp4_no_rotation", {"wgrad.left", "wgrad.right"}),
        ("nvfp4_nearest", {"dgrad.left", "wgrad.left"}),
        ("nvfp4_1d_weights", {"forward.right", "dgrad.right"}),
    ],
)
def test_a_recipe_without_one_ingredient_differs_in_that_alone(changes, differ):
    own = dict(LINEAR_RECIPES[changes].operands())
    assert {place for place, each in NVFP4.operands() if own[place] != each} == differ
    assert LINEAR_RECIPES[changes].last_blocks == NVFP4.last_blocks


@pytest.mark.parametrize(
    ("depth", "count"), [(1, 1), (2, 1), (4, 1), (12, 2), (20, 3), (62, 10), (100, 15)]
)
def test_nvfp4_leaves_at_least_15_percent_of_the_blocks_out_and_others_none(depth, count):
    assert NVFP4.left_out(depth) == count
    assert LINEAR_RECIPES["mxfp8"].left_out(depth) == 0


def _both(**changes):
    operand = LinearOperand(**{"encoding": "e4m3"} | changes)
    return LinearProduct(operand, operand)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": _both(encoding="nvfp5")}, "must be a block recipe, got 'nvfp5'; nearest: "),
        (
            {"dgrad": _both(rounding="random")},
            r"dgrad.left must be rounded by one of nearest_even, .* got LinearOperand.*'random'",
        ),
        ({"wgrad": _both(rotation=12)}, r"wgrad.left must be rotated by a power of two or 0"),
        ({"forward": _both(of_forward=True)}, "forward.left must be of_forward in the x of wgrad"),
        (
            {"wgrad": _both()._replace(left=LinearOperand(encoding="e4m3", rotation=16))},
            r"wgrad must be a product of two operands with the same rotation",
        ),
        ({"output": "e4m3"}, "output must be one of bf16, fp16, fp32, got 'e4m3' in 'nvfp4'"),
        ({"last_blocks": 1.0}, "last_blocks must be from 0 to below 1, got 1.0"),
    ],
)
def test_a_recipe_that_contradicts_itself_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        replace(NVFP4, **changes)
