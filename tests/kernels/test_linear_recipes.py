"""A recipe of linear layers is found by its name, and one that contradicts itself is refused."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from attention_kernels.block_recipes import BLOCK_RECIPES
from attention_kernels.formats import FORMATS, ROUNDINGS
from attention_kernels.linear_recipes import (
    LINEAR_RECIPES,
    OUTPUTS,
    LinearOperand,
    LinearProduct,
    LinearRecipe,
    linear_recipe_named,
)
from tests.kernels.recipe_texts import WRITTEN_OUT

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


@pytest.mark.parametrize("name", LINEAR_RECIPES)
def test_a_published_recipe_can_be_written_in_its_parts(name):
    found, published = linear_recipe_named(WRITTEN_OUT[name]), LINEAR_RECIPES[name]
    assert found.name == WRITTEN_OUT[name]
    assert replace(found, name=name, source=published.source) == published


def test_parts_are_one_recipe_however_they_are_spelled():
    wanted = "forward=mxfp4 dgrad=mxfp8+stochastic/mxfp8 wgrad=mxfp8 last_blocks=0.1"
    for text in (
        wanted,
        "  all=mxfp8   last_blocks=.10 dgrad=mxfp8+stochastic/mxfp8+nearest_even forward=mxfp4 ",
        "weight_gradient=fp32 output=bf16 wgrad=mxfp8/mxfp8 all=mxfp4+rotated0 "
        "dgrad=mxfp8+rotated0+stochastic/mxfp8 last_blocks=1e-1",
    ):
        assert linear_recipe_named(text) == linear_recipe_named(wanted)
        assert linear_recipe_named(text).name == wanted
    others = (
        wanted.replace("+stochastic", ""),
        wanted.replace("mxfp8+stochastic/mxfp8", "mxfp8/mxfp8+stochastic"),
        wanted.replace("0.1", "0.2"),
        f"{wanted} output=fp32",
    )
    assert len({linear_recipe_named(text).name for text in (wanted, *others)}) == 5


@pytest.mark.parametrize("encoding", [*BLOCK_RECIPES, *(n for n in FORMATS if n != "fp64")])
def test_each_block_recipe_and_format_may_be_every_operand(encoding):
    recipe = linear_recipe_named(f"all={encoding}")
    assert {each for _, each in recipe.operands()} == {LinearOperand(encoding=encoding)}


_ENCODINGS = st.sampled_from([*BLOCK_RECIPES, "mxfp6-e3m2-even", "bf16", "e4m3-saturate", "e3m4"])
_OPERANDS = st.builds(
    LinearOperand, encoding=_ENCODINGS, rounding=st.sampled_from(ROUNDINGS)
) | st.builds(
    LinearOperand,
    encoding=st.sampled_from(["delayed-e4m3", "delayed-e2m1"]),
    history=st.sampled_from([1, 16, 1024, 100_000]),
)


@st.composite
def _products(draw, with_stored=False):
    size = draw(st.sampled_from([0, 1, 16, 4096]))
    left, right = (replace(draw(_OPERANDS), rotation=size) for _ in range(2))
    return LinearProduct(left, replace(right, of_forward=with_stored and draw(st.booleans())))


@given(
    recipe=st.builds(
        LinearRecipe,
        name=st.just("drawn"),
        forward=_products(),
        dgrad=_products(),
        wgrad=_products(with_stored=True),
        output=st.sampled_from(OUTPUTS),
        weight_gradient=st.sampled_from(OUTPUTS),
        last_blocks=st.floats(0, 0.999),
    )
)
def test_every_recipe_of_named_blocks_has_a_text_that_gives_it_back(recipe):
    """Written as a user would, each operand of its own."""
    found = linear_recipe_named(" ".join(_parts_of(recipe)))
    assert replace(found, name="drawn") == recipe
    assert linear_recipe_named(found.name) == found


def _parts_of(recipe):
    for name in ("wgrad", "forward", "dgrad"):
        told = (
            f"{each.encoding}+rotated{each.rotation}+{each.rounding}"
            + "+of_forward" * each.of_forward
            + f"+history{each.history}" * each.encoding.startswith("delayed")
            for each in getattr(recipe, name)
        )
        yield f"{name}={'/'.join(told)}"
    for name in ("last_blocks", "output", "weight_gradient"):
        yield f"{name}={getattr(recipe, name)}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mxfp4", "got 'mxfp4'; nearest: mxfp8, .*; in every product: all=mxfp4"),
        ("forward=mxfp4", "must give .* got none of dgrad, wgrad in 'forward=mxfp4'"),
        ("forwards=mxfp4", "parts called all, forward, .* got 'forwards=mxfp4'; nearest: forward"),
        (
            "all=mxfp4 stochastic",
            "must be in parts .* each as NAME=VALUE .* got 'stochastic'",
        ),
        ("all=mxfp4 all=mxfp8", "must give all once, got it twice"),
        ("all=mxfp4/mxfp8", "all must be one operand, got 'mxfp4/mxfp8'; a pair is of one product"),
        ("all=mxfp4 dgrad=mxfp8/mxfp8/mxfp8", "dgrad must be one operand or LEFT/RIGHT, got 'mxf"),
        ("all=mxpf4", "all must be in a block recipe, .* got 'mxpf4'; nearest: mxfp4"),
        (
            "all=mxfp4 wgrad=/mxfp8",
            "wgrad must be in a block recipe, a format or delayed-<format>, got ''",
        ),
        ("all=fp64", "all must be in a format that FP32 holds, got 'fp64'"),
        (
            "all=mxfp4+stochstic",
            r"all must have after a \+ one .* 'stochstic'; nearest: stoch",
        ),
        ("all=mxfp4+rotated8192", "rotated<size up to 4096>, .* got 'rotated8192'"),
        ("all=mxfp4+rotated12", "forward.left must be rotated by a power of two or 0"),
        ("all=mxfp4+stochastic+away", "all must say rounding once, got 'mxfp4.stochastic.away'"),
        ("all=mxfp4+of_forward", "forward.left must be of_forward in the x of wgrad alone"),
        ("all=mxfp8 wgrad=mxfp8+rotated16/mxfp8", "wgrad must be .* with the same rotation"),
        ("all=mxfp8 output=e4m3", "output must be one of bf16, fp16, fp32, got 'e4m3'"),
        ("all=mxfp8 last_blocks=two", "last_blocks must be a number, got 'two'"),
        ("all=mxfp8 last_blocks=nan", "last_blocks must be from 0 to below 1, got nan"),
        ("delayed-e4m3", "got 'delayed-e4m3'; nearest: .*; in every product: all=delayed-e4m3"),
        ("all=delayed-mxfp8", "all must be in a block recipe, .* got 'delayed-mxfp8'"),
        ("all=delayed-e4q3", "got 'delayed-e4q3'; nearest: delayed-e4m3"),
        ("all=delayed-fp64", "all must be in a format that FP32 holds, got 'delayed-fp64'"),
        ("all=delayed-e4m3+history0", "history<updates up to 100000>, got 'history0'"),
        ("all=delayed-e4m3+history100001", "history<updates up to 100000>, got 'history100001'"),
        ("all=mxfp8+history16", "all must be in delayed-<format> where it has a history"),
        ("all=mxfp8+history1024", "in delayed-<format> .* got 'mxfp8.history1024'"),
    ],
)
def test_what_is_no_recipe_in_parts_is_refused_with_what_is_wrong_in_it(text, message):
    with pytest.raises(ValueError, match=message):
        linear_recipe_named(text)


@pytest.mark.parametrize(
    ("text", "formats"),
    [
        ("all=mxfp4", {"bf16", "fp32"}),
        ("all=mxfp4 dgrad=e4m3/mxfp4", {"e4m3", "bf16", "fp32"}),
        ("all=mxfp4 wgrad=e5m2/mxfp4", {"e5m2", "bf16", "fp32"}),
        ("all=mxfp4 forward=e4m3 dgrad=mxfp4/e4m3", {"bf16", "fp32"}),
        ("all=mxfp4 output=fp16", {"fp16", "fp32"}),
        ("fp8_delayed", {"bf16", "fp32"}),
        ("all=mxfp4 weight_gradient=fp16", {"bf16", "fp16"}),
    ],
)
def test_gradients_without_a_scale_of_their_own_are_known(text, formats):
    assert {each.name for each in linear_recipe_named(text).unscaled_gradients()} == formats


@pytest.mark.parametrize("history", [0, -3, 100_001, 2.5])
def test_a_history_that_can_not_be_is_refused_in_a_recipe_of_ones_own(history):
    own = LinearOperand(encoding="delayed-e4m3", history=history)
    plain = LINEAR_RECIPES["fp8_delayed"]
    with pytest.raises(ValueError, match=r"forward.left must be of a history of 1 to 100000"):
        replace(plain, forward=LinearProduct(own, own))
    elsewhere = LinearOperand(encoding="mxfp8", history=16)
    with pytest.raises(ValueError, match=r"dgrad.left must be in delayed-<format> where"):
        replace(plain, dgrad=LinearProduct(elsewhere, elsewhere))
