"""`recipe:NAME` in a config: of single modules or of all blocks, and what can't be, in a line."""

import json

import pytest

from stability.config.arms import describe_change, expand
from stability.config.convert import ConfigError, from_dict, to_dict
from stability.config.load import load_study
from stability.config.model import layer_names
from stability.config.precision import (
    linear_recipe,
    parse_precision,
    precision_change,
    precision_text,
)
from stability.config.schema import ArmConfig

STUDY = """
name: tiny
question: Does it matter?
base:
  model: {depth: DEPTH, width: 32, heads: 2, context: 32, builder: BUILDER}
  precision: PRECISION
  train: {steps: 10}
arms: ARMS
seeds: [0]
"""


@pytest.fixture
def read(tmp_path):
    def read_study(precision="bf16-mixed", arms="{}", changes=None, depth=8, builder="gpt2"):
        path = tmp_path / "tiny.yaml"
        text = STUDY.replace("PRECISION", precision).replace("ARMS", arms)
        path.write_text(text.replace("DEPTH", str(depth)).replace("BUILDER", builder))
        return load_study(path, changes)

    return read_study


def test_a_recipe_of_all_blocks_is_kept_as_it_was_written_and_named_block_by_block():
    precision = parse_precision("recipe:nvfp4, *.query=fp32")
    assert precision.text == "recipe:nvfp4, *.query=fp32"
    assert precision.default == "bf16-mixed"
    assert precision.emulates
    assert not precision.needs_scaler
    assert precision.of_module("blocks.layer_0.key") == ""
    of = precision.over(layer_names(8)).of_module
    assert of("blocks.layer_0.key") == of("blocks.layer_5.mlp_up") == "recipe:nvfp4"
    assert of("blocks.layer_6.key") == of("blocks.layer_7") == of("final_norm") == of("") == ""
    assert of("blocks.layer_0.query") == of("blocks.layer_7.query") == "fp32"
    whole = parse_precision("recipe:mxfp8").over(layer_names(2))
    assert whole.text == "bf16-mixed, blocks.layer_0=recipe:mxfp8, blocks.layer_1=recipe:mxfp8"
    assert parse_precision("bf16-mixed").over(layer_names(2)) == parse_precision("bf16-mixed")


def test_names_of_blocks_are_not_those_that_begin_alike():
    of = parse_precision("recipe:mxfp8").over(layer_names(2)).of_module
    assert of("blocks.layer_1.key") == "recipe:mxfp8"
    assert of("blocks.layer_10.key") == ""


def test_an_arm_lays_its_globs_over_a_recipe_of_the_base_and_may_replace_it(read):
    study = read(
        '{default: recipe:nvfp4, "*.query": bf16}',
        '{x: {precision: {"*.key": bf16}}, y: {precision: {default: recipe:mxfp8}},'
        " z: {precision: bf16-mixed}}",
    )
    arms = {arm.name: arm for arm in expand(study)}
    before = "recipe:nvfp4, *.query=bf16"
    assert arms["x"].diff == {"precision": (before, "recipe:nvfp4, *.query=bf16, *.key=bf16")}
    assert arms["y"].diff == {"precision": (before, "recipe:mxfp8, *.query=bf16")}
    assert arms["z"].diff == {"precision": (before, "bf16-mixed")}
    assert arms["y"].config.precisions.of_module("blocks.layer_7.key") == "recipe:mxfp8"
    assert arms["x"].config.precisions.of_module("blocks.layer_7.key") == "bf16"
    assert precision_text({"default": "recipe:nvfp4"}) == "recipe:nvfp4"


def test_the_reference_of_a_recipe_is_fp32(read):
    (_, arm) = expand(read("recipe:nvfp4", "{x: {role: reference}}"))
    assert arm.config.precision == "32-true"


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("bf16-mixed", "recipe:nvfp4", "bf16-mixed -> recipe:nvfp4"),
        ("bf16-mixed", "recipe:nvfp4, x=fp32", "bf16-mixed -> recipe:nvfp4, x=fp32"),
        ("recipe:nvfp4", "recipe:nvfp4_nearest", "recipe:nvfp4 -> recipe:nvfp4_nearest"),
        ("bf16-mixed", "bf16-mixed, *.mlp_*=recipe:mxfp8", "*.mlp_* in recipe:mxfp8"),
        ("recipe:nvfp4", "recipe:nvfp4, *.query=fp32", "*.query in fp32"),
    ],
)
def test_a_ladder_names_the_recipe(before, after, said):
    assert precision_change(before, after) == said
    base, difference = {"attention": {}, "precision": before}, {"precision": [before, after]}
    assert describe_change("arm", "precision", difference, base) == said


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("recipe:nvpf4", "recipe must be one .* got 'nvpf4'; nearest: nvfp4, .* in 'recipe:nvpf4'"),
        ("{default: bf16-mixed, x: recipe:mxpf8}", "recipe must be .* got 'mxpf8'; nearest: mxfp8"),
        ("{default: bf16-mixed, x: nvfp4}", "x must be .* got 'nvfp4'; nearest: recipe:nvfp4"),
        ("nvfp4", "must be a known name or .* got 'nvfp4'; nearest: recipe:nvfp4"),
        ("{default: 32-true, x: recipe:nvfp4}", "default must be bf16-mixed, 16-mixed or .* got"),
    ],
)
def test_what_is_no_recipe_is_said_in_a_line_with_the_nearest(read, precision, message):
    with pytest.raises(ConfigError, match=f"tiny.yaml: base.precision: {message}"):
        read(precision)


def test_a_recipe_that_leaves_every_block_out_is_refused(read):
    message = "recipe:nvfp4 must leave a block to compute so, got 1 in all, of which 1 stay in BF16"
    with pytest.raises(ConfigError, match=f"base.*{message}; name modules by globs"):
        read("recipe:nvfp4", depth=1)
    assert read("recipe:mxfp8", depth=1)


def test_a_recipe_of_all_blocks_is_refused_of_a_model_whose_blocks_are_not_known(read):
    own = {"builder": "tests.stability.study.own_models:build"}
    with pytest.raises(ConfigError, match=r"recipe:mxfp8 of all blocks must be of a model of ours"):
        read("recipe:mxfp8", **own)
    assert read('{default: bf16-mixed, "layers.*": recipe:mxfp8}', **own)


@pytest.mark.parametrize(
    "precision", ["recipe:mxfp8", '{default: bf16-mixed, "*.mlp_*": recipe:mxfp8}']
)
def test_a_recipe_is_refused_in_a_compiled_arm(read, precision):
    changes = {"train.compile": "inductor"}
    with pytest.raises(ConfigError, match=r"base.precision: must not be emulated where .*inductor"):
        read(precision, changes=changes)


PARTS = "{wgrad: mxfp8+stochastic/mxfp8, forward: mxfp4/mxfp4, dgrad: mxfp8}"
TEXT = "recipe:forward=mxfp4 dgrad=mxfp8 wgrad=mxfp8+stochastic/mxfp8"


def test_a_recipe_in_parts_is_one_text_in_whatever_form_it_is_given(read):
    as_text = "recipe:wgrad=mxfp8+stochastic/mxfp8 all=mxfp8 forward=mxfp4"
    study = read(
        arms=f'{{x: {{precision: {{"*.mlp_*": {PARTS}}}}},'
        f' y: {{precision: {{"*.mlp_*": "{as_text}"}}}},'
        f' all: {{precision: {{default: {PARTS}}}}}, plain: {{precision: "{as_text}"}},'
        ' other: {precision: {"*.mlp_*": {all: mxfp8, forward: mxfp4}}}}'
    )
    arms = {arm.name: arm for arm in expand(study)}
    by_module = f"bf16-mixed, *.mlp_*={TEXT}"
    assert arms["x"].diff == {"precision": ("bf16-mixed", by_module)} == arms["y"].diff
    assert arms["all"].diff == {"precision": ("bf16-mixed", TEXT)} == arms["plain"].diff
    assert arms["x"].config == arms["y"].config != arms["other"].config
    assert arms["x"].config.precisions.of_module("blocks.layer_3.mlp_up") == TEXT
    said = precision_change(*arms["x"].diff["precision"])
    assert said == f"*.mlp_* in {TEXT}"


def test_a_recipe_in_parts_comes_back_from_the_config_of_a_manifest(read):
    for given in (TEXT, f'{{default: bf16-mixed, "*.mlp_*": {PARTS}, "*.query": fp32}}'):
        config = read(given).base
        kept = json.loads(json.dumps(to_dict(config)))
        assert from_dict(ArmConfig, kept, "manifest") == config
        assert TEXT in kept["precision"]
        assert parse_precision(kept["precision"]).text == kept["precision"]


def test_an_arm_lays_its_parts_over_the_glob_of_the_base_as_a_whole(read):
    study = read(
        f'{{default: bf16-mixed, "*.mlp_*": {PARTS}}}',
        '{x: {precision: {"*.mlp_*": {all: mxfp4}}}}',
        {"precision": '{"*.query": {all: fp8_per_row}}'},
    )
    of = {arm.name: arm.config.precisions.of_module for arm in expand(study)}
    assert of["baseline"]("blocks.layer_0.mlp_up") == TEXT
    four = "recipe:forward=mxfp4 dgrad=mxfp4 wgrad=mxfp4"
    assert of["x"]("blocks.layer_0.mlp_up") == four
    rows = "recipe:forward=fp8_per_row dgrad=fp8_per_row wgrad=fp8_per_row"
    assert of["x"]("blocks.layer_0.query") == rows


def test_the_last_blocks_of_a_recipe_in_parts_stay_in_bf16(read):
    config = read("{default: {all: mxfp4, last_blocks: 0.25}}").base
    text = "recipe:forward=mxfp4 dgrad=mxfp4 wgrad=mxfp4 last_blocks=0.25"
    assert config.precision == text
    of = config.precisions.of_module
    assert of("blocks.layer_5.mlp_up") == text
    assert of("blocks.layer_6.mlp_up") == ""
    recipe = linear_recipe(text)
    assert recipe is not None
    assert recipe.last_blocks == 0.25


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("recipe:all=mxfp4", False),
        ("recipe:all=bf16", False),
        ("recipe:all=mxfp4 forward=e4m3", False),
        ("recipe:all=mxfp4 dgrad=e5m2/mxfp4", True),
        ("bf16-mixed, x=recipe:all=mxfp4 output=fp16", True),
        ("bf16-mixed, x=recipe:all=e4m3", True),
    ],
)
def test_a_loss_scaler_is_needed_where_a_recipe_gives_gradients_no_scale(text, needs):
    assert parse_precision(text).needs_scaler is needs


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        ("recipe:mxfp4", "recipe must be one .* in every product: all=mxfp4, in 'recipe:mxfp4'"),
        (
            "{all: mxfp4, dgrad: mxfp8}",
            "parts of a recipe must stand below default or a glob, as in "
            "`{default: {all: mxfp4, dgrad: mxfp8}}`",
        ),
        ("recipe:forward=mxfp4", "recipe: must give .* got none of dgrad, wgrad"),
        ("{default: {all: mxpf4}}", "recipe: all must be .* got 'mxpf4'; nearest: mxfp4"),
        ("{default: bf16-mixed, x: {fwd: mxfp4}}", "recipe: must be in parts .* got 'fwd=mxfp4'"),
        ("{default: bf16-mixed, x: {all: [mxfp4]}}", r"all must be operands .* got \['mxfp4'\]"),
        ("{default: bf16-mixed, x: {all: {x: mxfp4}}}", "all must be operands of a recipe as text"),
        ("{default: bf16-mixed, x: {all: true}}", "all must be operands .* got True"),
        ("{default: bf16-mixed, x: {}}", "recipe must be one of a linear layer, got ''"),
        (
            '{default: bf16-mixed, x: "recipe:all=mxfp8, forward=mxfp4"}',
            "must map globs of modules to names .* got 'x': 'recipe:all=mxfp8, forward=mxfp4'",
        ),
        (
            "{default: bf16-mixed, x: {all: mxfp4, last_blocks: 0.1}}",
            "x must not have last_blocks, got .* a glob names its modules itself",
        ),
        (
            "recipe:all=mxfp4 last_blocks=0.9",
            "recipe:forward=mxfp4 .* must leave a block to compute so, got 8 in all",
        ),
        (
            "recipe:fp8_delay",
            "recipe must be one of a linear layer, got 'fp8_delay'; .* fp8_delayed",
        ),
        ("{default: {all: delayed-mx}}", "recipe: all must be in a block recipe, .* 'delayed-mx'"),
    ],
)
def test_what_is_no_recipe_in_parts_is_said_in_a_line(read, precision, message):
    with pytest.raises(ConfigError, match=f"tiny.yaml: base.*: {message}"):
        read(precision)


def test_a_recipe_in_parts_is_refused_in_a_compiled_arm(read):
    with pytest.raises(ConfigError, match=r"base.precision: must not be emulated where .*inductor"):
        read("recipe:all=mxfp4", changes={"train.compile": "inductor"})
