"""`recipe:NAME` in a config: of single modules or of all blocks, and what can't be, in a line."""

import pytest

from stability.config.arms import describe_change, expand
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.config.model import layer_names
from stability.config.precision import parse_precision, precision_change, precision_text

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
