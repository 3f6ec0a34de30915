"""A precision by module is one text of an ordered mapping, and what can't be is said in a line."""

import pytest

from stability.config.arms import describe_change, expand
from stability.config.axes import groups_of
from stability.config.convert import ConfigError
from stability.config.load import load_study
from stability.config.precision import (
    NATIVE,
    OF_MODULES,
    OPERANDS,
    parse_precision,
    precision_text,
)
from stability.records import witness

MIXED = {"default": "bf16-mixed", "*.mlp_*": "emulated:e4m3", "blocks.layer_0": "fp32"}
TEXT = "bf16-mixed, *.mlp_*=emulated:e4m3, blocks.layer_0=fp32"
STUDY = """
name: tiny
question: Does it matter?
base:
  model: {depth: 2, width: 32, heads: 2, context: 32}
  precision: PRECISION
  train: {steps: 10}
arms: ARMS
seeds: [0]
"""


@pytest.fixture
def read(tmp_path):
    def read_study(precision="bf16-mixed", arms="{}", changes=None):
        path = tmp_path / "tiny.yaml"
        path.write_text(STUDY.replace("PRECISION", precision).replace("ARMS", arms))
        return load_study(path, changes)

    return read_study


def test_a_mapping_becomes_one_text_and_the_text_the_mapping_again():
    assert precision_text(MIXED) == TEXT
    assert parse_precision(TEXT).text == TEXT
    assert dict(parse_precision(TEXT).modules) == {k: v for k, v in MIXED.items() if k != "default"}
    assert precision_text("32-true") == "32-true"


def test_the_last_glob_that_names_a_module_or_what_holds_it_decides():
    of = parse_precision(TEXT).of_module
    assert of("blocks.layer_1.mlp_up") == "emulated:e4m3"
    assert of("blocks.layer_0.mlp_up") == "fp32"  # named by the layer, which stands last
    assert of("blocks.layer_0") == of("blocks.layer_0.query") == "fp32"
    assert of("blocks.layer_1.query") == of("") == of("blocks") == ""
    turned = parse_precision("bf16-mixed, blocks.layer_0=fp32, *.mlp_*=bf16").of_module
    assert turned("blocks.layer_0.mlp_up") == "bf16"


def test_an_arm_lays_its_globs_over_those_of_the_base_and_changes_one_thing(read):
    study = read(
        '{default: bf16-mixed, "*.mlp_*": fp32, "*.query": fp32}',
        '{x: {precision: {"*.key": bf16, "*.mlp_*": emulated:e5m2}}, y: {precision: bf16-mixed}}',
    )
    arms = {arm.name: arm for arm in expand(study)}
    before = "bf16-mixed, *.mlp_*=fp32, *.query=fp32"
    after = "bf16-mixed, *.query=fp32, *.key=bf16, *.mlp_*=emulated:e5m2"
    assert arms["x"].diff == {"precision": (before, after)}
    assert arms["y"].diff == {"precision": (before, "bf16-mixed")}
    assert groups_of(arms["x"].diff) == ["precision"]


def test_an_arm_may_give_one_module_a_precision_of_its_own(read):
    (_, arm) = expand(read(arms='{x: {precision: {"*.mlp_up": fp32}}}'))
    assert arm.diff == {"precision": ("bf16-mixed", "bf16-mixed, *.mlp_up=fp32")}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("32-true", "32-true"),
        ('{"*.query": fp32}', "bf16-mixed, *.mlp_*=fp32, *.query=fp32"),
        ("16-mixed, *.key = fp32", "16-mixed, *.key=fp32"),
    ],
)
def test_the_command_line_lays_a_mapping_over_the_studys_and_a_text_in_its_place(
    read, given, expected
):
    study = read('{default: bf16-mixed, "*.mlp_*": fp32}', changes={"precision": given})
    assert study.base.precision == expected


def test_a_reference_of_a_mapping_is_fp32_throughout(read):
    (_, arm) = expand(read('{default: bf16-mixed, "*.mlp_*": fp32}', "{x: {role: reference}}"))
    assert arm.config.precision == "32-true"


@pytest.mark.parametrize(
    ("precision", "message"),
    [
        (
            '{default: 32-true, "*.mlp_*": bf16}',
            "default must be bf16-mixed, 16-mixed or emulated:<format> where .* got '32-true'",
        ),
        (
            '{default: bf16-mixed, "*.mlp_*": bf16-true}',
            r"\*.mlp_\* must be fp32, bf16, fp16, .* got 'bf16-true'; that is one of all modules",
        ),
        ("{default: bf16-mixed, x: f32}", "x must be .* got 'f32'; nearest: fp32"),
        ("{default: bf16-mixed, x: emulated:e9m9}", "must emulate a format that FP32 holds"),
        ("{default: bf16, x: fp32}", "must be a known name .* got 'bf16'; nearest: bf16-"),
        ("{x: fp32}", "must have a default, for modules that no glob names"),
        ("{default: bf16-mixed, x: 32}", "must map globs of modules to names .* got 'x': 32"),
        ('{default: bf16-mixed, "x=y": fp32}', "must map globs of modules .* got 'x=y': 'fp32'"),
        ("'bf16-mixed, x'", "must be a name, and after it GLOB=PRECISION .* got 'x'"),
        ("'bf16-mixed, x=fp32, x=bf16'", "must name a glob once, got 'x' twice"),
    ],
)
def test_what_is_no_precision_is_said_in_a_line(read, precision, message):
    with pytest.raises(ConfigError, match=f"tiny.yaml: base.precision: {message}"):
        read(precision)


def test_an_arm_is_named_where_its_mapping_is_wrong(read):
    with pytest.raises(ConfigError, match=r"arms.x.precision: x must be fp32, .* got 'f32'"):
        read(arms="{x: {precision: {x: f32}}}")


def test_emulation_of_a_module_is_refused_in_a_compiled_arm(read):
    changes = {"train.compile": "inductor"}
    with pytest.raises(ConfigError, match=r"base.precision: must not be emulated where .*inductor"):
        read('{default: bf16-mixed, "*.mlp_*": emulated:e4m3}', changes=changes)
    assert read('{default: bf16-mixed, "*.mlp_*": fp32}', changes=changes)


@pytest.mark.parametrize(
    ("text", "needs"),
    [
        ("bf16-mixed, x=fp32", False),
        ("bf16-mixed, x=emulated:e8m3", False),
        ("bf16-mixed, x=fp16", True),
        ("bf16-mixed, x=emulated:e4m3", True),
        ("emulated:e5m2, x=fp32", True),
    ],
)
def test_a_loss_scaler_is_needed_where_one_format_is_narrow(text, needs):
    assert parse_precision(text).needs_scaler is needs


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("bf16-mixed", "32-true", "bf16-mixed -> 32-true"),
        ("bf16-mixed", "bf16-mixed, x=fp32, y=bf16", "x in fp32; y in bf16"),
        ("bf16-mixed, x=fp32, y=bf16", "bf16-mixed, x=bf16", "x in bf16; y as others"),
        (
            "bf16-mixed, x=fp32, y=bf16",
            "bf16-mixed, y=bf16, x=fp32",
            "bf16-mixed, x=fp32, y=bf16 -> bf16-mixed, y=bf16, x=fp32",
        ),
    ],
)
def test_a_ladder_names_the_modules_that_changed(before, after, said):
    base = {"attention": {}, "precision": before}
    difference = {"precision": [before, after]}
    assert describe_change("arm", "precision", difference, base) == said


def test_what_a_run_multiplies_and_what_its_witness_is_held_to_are_one_table():
    # two tables: the room of records may not read the config's, nor the other way round
    assert witness._OPERANDS == OPERANDS
    assert set(OPERANDS) == {*NATIVE, *OF_MODULES}
