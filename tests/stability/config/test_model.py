"""Which builders, shapes and options a config may name; how transformers' folders are read."""

import json

import pytest

from stability.analysis.pair_contract import ContractError, axis_of
from stability.config.arms import expand
from stability.config.axes import why_fixed
from stability.config.convert import ConfigError, Place, from_dict, to_dict
from stability.config.load import load_study
from stability.config.schema import ModelConfig

SHAPE = {"depth": 2, "width": 32, "heads": 2, "context": 32}
FOLDER = {
    "model_type": "gpt2",
    "n_layer": 2,
    "n_embd": 48,
    "n_head": 3,
    "n_positions": 64,
    "vocab_size": 300,
    "resid_pdrop": 0.1,
    "transformers_version": "5.0",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(FOLDER))
    return tmp_path / "mine"


def _model(write_study, model, **overrides):
    def edit(content):
        content["base"]["model"] = model

    return load_study(write_study(edit), overrides).base.model


@pytest.mark.parametrize("form", ["folder", "file", "hf", "command line"])
def test_a_model_may_be_named_by_its_folder(write_study, folder, form):
    name = {"file": str(folder / "config.json")}.get(form, str(folder))
    if form == "command line":
        model = load_study(write_study(), {"model": name}).base.model
    else:
        model = _model(write_study, {"hf": name} if form == "hf" else name)
    assert (model.builder, model.depth, model.width, model.heads) == ("huggingface", 2, 48, 3)
    assert (model.context, model.vocab_size, model.kv_heads) == (64, 300, 0)
    assert (model.init, model.head_dim, model.is_ours) == ("own", 16, False)
    assert model.options["folder"] == str(folder)
    assert model.options["weights"] == "random"
    assert model.options["config"]["resid_pdrop"] == 0.0, "no dropout is trained with"
    assert "transformers_version" not in model.options["config"]
    assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(model))), "a record") == model


def test_a_folder_may_be_trained_on_less_context_and_from_its_weights(write_study, folder):
    model = _model(write_study, {"hf": str(folder), "context": 32, "weights": "given"})
    assert (model.context, model.options["weights"]) == (32, "given")
    assert model.drawn().options["weights"] == "random"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"hf": "/nowhere"}, r"base.model.hf: must be a folder with a config.json, or such a file"),
        ({"hf": 3}, r"base.model.hf: must be a folder with a config.json, or such a file, got 3"),
        (
            "/nowhere",
            "base.model: must be a model preset, got '/nowhere'; nearest: .*, or a folder",
        ),
        ({"hf": "{folder}", "context": 65}, "context must be at most the 64 positions of its conf"),
        ({"hf": "{folder}", "depth": 3}, "depth must be 2, as in its config, got 3"),
        ({"hf": "{folder}", "heads": 4}, "heads must be 3, as in its config, got 4"),
        ({"hf": "{folder}", "weights": "pretrained"}, "weights must be random or given, got 'pre"),
        ({"hf": "{folder}", "dropout": 0.1}, "dropout must be left out where huggingface builds"),
        ({"hf": "{folder}", "qk_norm": True}, "qk_norm must be left out where huggingface builds"),
        (
            {"hf": "{folder}", "init": "gpt2"},
            "init must be own, xavier, kaiming, orthogonal or MOD",
        ),
        ({**SHAPE, "builder": "huggingface"}, "options must hold the `config` of a model: write"),
        ({**SHAPE, "builder": "llama2"}, "base.model.builder: must be a known .* nearest: llama"),
        (
            {**SHAPE, "builder": "llama", "options": {"theta": 1}},
            "options must be of mlp_width, ro",
        ),
        ({**SHAPE, "options": {"tied": True}}, "options must be of none for gpt2, got 'tied'"),
        (
            {**SHAPE, "builder": "llama", "options": {"tied": 1}},
            "options: tied must be true or false, got 1",
        ),
        (
            {**SHAPE, "builder": "llama", "options": {"rope_theta": "big"}},
            "options: rope_theta must be a number >= 0 and finite, got 'big'",
        ),
        (
            {**SHAPE, "builder": "llama", "options": {"rope_theta": 0}},
            "options: rope_theta must be > 0, got 0",
        ),
        (
            {**SHAPE, "builder": "llama", "options": {"mlp_width": 1.5}},
            "options: mlp_width must be a whole number, got 1.5",
        ),
        (
            {**SHAPE, "builder": "llama", "width": 34},
            "width / heads must be even, RoPE turns pairs",
        ),
        ({**SHAPE, "builder": "llama", "init": "own"}, "init must be gpt2, xavier, kaiming"),
        ({**SHAPE, "builder": "my:build", "init": "gpt2"}, "init must be own, xavier"),
    ],
)
def test_a_model_that_can_not_be_is_told_where_it_stands(write_study, folder, model, message):
    if isinstance(model, dict):
        model = {k: str(folder) if v == "{folder}" else v for k, v in model.items()}
    with pytest.raises(ConfigError, match=message):
        _model(write_study, model)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "must be a config of transformers: Expecting"),
        ("[]", "must be a config of transformers, and has no model_type"),
        ('{"model_type": "gpt2"}', "does not tell its depth, width, heads, context, vocab_size"),
        (
            '{"a": "' + "x" * 2**20 + '"}',
            "must be a config of transformers: holds more than 1048576",
        ),
    ],
)
def test_a_damaged_config_is_told(write_study, folder, text, message):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        _model(write_study, {"hf": str(folder)})


def test_what_a_config_does_not_tell_is_given_beside_it(write_study, folder):
    config = {key: value for key, value in FOLDER.items() if key != "n_positions"}
    (folder / "config.json").write_text(json.dumps(config))
    assert _model(write_study, {"hf": str(folder), "context": 99}).context == 99


def test_a_head_dim_of_its_own_is_read_from_the_config(write_study, folder):
    config = {**FOLDER, "head_dim": 32, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    model = _model(write_study, str(folder))
    assert (model.head_dim, model.attention_width, model.kv_width) == (32, 96, 32)


def test_options_that_keep_the_weights_may_be_an_axis():
    for path in ("model.options.rope_theta", "model.options.gain", "model.options.config.eps"):
        assert why_fixed(path) == ""
    for path in ("model.options.tied", "model.options.mlp_width", "model.builder"):
        assert why_fixed(path).startswith("its weights would have other shapes")
    assert "the same weights" in why_fixed("model.options.weights")


def arms_of(path):
    return expand(load_study(path), Place(source=str(path)))


def test_an_arm_of_another_theta_is_a_pair_and_of_another_builder_is_none(write_study):
    def edit(content, options):
        content["base"]["model"] = {**SHAPE, "builder": "llama"}
        content["arms"] = {"other": {"model": options}}
        content["yardstick"] = ""

    _, other = arms_of(write_study(lambda c: edit(c, {"options": {"rope_theta": 5e5}})))
    assert axis_of(other) == "model.options.rope_theta"
    _, other = arms_of(write_study(lambda c: edit(c, {"builder": "gpt2"})))
    with pytest.raises(ContractError, match="its weights would have other shapes"):
        axis_of(other)
