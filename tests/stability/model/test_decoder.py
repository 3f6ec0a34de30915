"""Building a model by name: what somebody else's has to be before it trains."""

import importlib.metadata
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.config import plugins
from stability.config.schema import ModelConfig, OptimizerConfig
from stability.model.decoder import attentions_of, blocks_of, build_decoder
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise
from stability.model.llama import Llama
from stability.model.optimizers import build_optimizer

OWN = "tests.stability.study.own_models"
SHAPE = {"depth": 2, "width": 32, "heads": 2, "context": 16}


def sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def own(name="build", **values):
    return ModelConfig(builder=f"{OWN}:{name}", **SHAPE, **values)


def huggingface(**config):
    values = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "vocab_size": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        **config,
    }
    return ModelConfig(builder="huggingface", **SHAPE, options={"config": values})


def test_a_builder_of_ours_goes_by_its_name():
    assert type(build_decoder(ModelConfig(**SHAPE), [sdpa] * 2)) is GPT
    assert type(build_decoder(ModelConfig(builder="llama", **SHAPE), [sdpa] * 2)) is Llama


def test_the_example_of_a_model_of_ones_own_is_a_decoder(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "examples"))
    config = ModelConfig(builder="own_model:build", **SHAPE, options={"bias": True})
    model = build_decoder(config, [sdpa] * 2)
    assert model(torch.arange(16)[None]).shape == (1, 16, 256)
    assert model.head.bias is not None


def test_a_builder_may_be_an_entry_point(monkeypatch):
    entry = importlib.metadata.EntryPoint("mine", f"{OWN}:build", plugins.MODELS)
    monkeypatch.setattr("stability.model.decoder.plugins", lambda group: {"mine": entry})
    model = build_decoder(ModelConfig(builder="mine", **SHAPE), [sdpa] * 2)
    assert type(model).__name__ == "Small"


@pytest.mark.parametrize("config", [own(), huggingface()], ids=["own", "huggingface"])
def test_weights_of_others_are_drawn_from_the_seed_and_no_generator_moves(config):
    state = torch.get_rng_state()
    first, again, other = (
        build_decoder(config, [sdpa] * 2, seed=seed).state_dict() for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("deaf", "made no attention call in a forward pass of one block: the arm's attention"),
        (
            "half_deaf",
            "must call the attention of each layer once a pass, called that of layer_0 2",
        ),
        ("looking_ahead", "must look at no later token: the logits of earlier ones change"),
        ("unmasked", r"must call attention\(q, k, v, causal=True, scale=None\), called it with"),
        (
            "wide",
            r"must return logits \(batch, tokens, vocab_size\), \(1, 8, 256\) here, got \(1, 8",
        ),
        ("infinite", "must return finite logits, got others before any update"),
        ("raising", r"must build a model of \(config, attention\): RuntimeError: no such luck"),
        ("failing", r"must give logits for tokens \(1, 8\): RuntimeError: out of order"),
        ("nothing", r"must return a torch.nn.Module, got NoneType"),
    ],
)
def test_a_model_that_is_no_decoder_is_refused_before_it_trains(name, message):
    with pytest.raises(ValueError, match=f"model: {OWN}:{name} {message}"):
        build_decoder(own(name), [sdpa] * 2)


def test_a_model_may_ignore_the_attention_where_nobody_changes_it_or_looks():
    build_decoder(own("deaf"), [sdpa] * 2, may_ignore_attention=True)
    with pytest.raises(ValueError, match="layer_0 2 times"):
        build_decoder(own("half_deaf"), [sdpa] * 2, may_ignore_attention=True)


def test_a_builder_that_can_not_be_imported_is_named():
    with pytest.raises(
        ValueError, match=r"model\.builder must be a function that .* has, got 'bild'"
    ):
        build_decoder(own("bild"), [sdpa] * 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "llama9"}, "'llama9' must be a causal language model of transformers"),
        ({"model_type": "vit"}, "'vit' must be a causal language model of transformers"),
        ({"num_attention_heads": 2, "model_type": "mistral", "sliding_window": 8}, "a window of 8"),
        ({"model_type": "bert"}, "plain causal attention, got one that looks at later tokens"),
        ({"attention_dropout": 0.1}, None),
    ],
    ids=["unknown", "no text", "window", "bidirectional", "dropout is not drawn in evaluation"],
)
def test_a_model_of_hugging_face_that_attends_otherwise_is_refused(config, message):
    if message is None:
        model = build_decoder(huggingface(**config), [sdpa] * 2)
        with pytest.raises(ValueError, match=r"plain causal attention, got a dropout of 0\.1"):
            model(torch.zeros(1, 4, dtype=torch.int64))
        return
    with pytest.raises(ValueError, match=message):
        build_decoder(huggingface(**config), [sdpa] * 2)


def test_a_model_of_hugging_face_without_transformers_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ValueError, match="transformers must be installed to build a model of Hug"):
        build_decoder(huggingface(), [sdpa] * 2)


def test_given_weights_are_those_of_the_folder(tmp_path):
    config = huggingface(tie_word_embeddings=True)
    first = build_decoder(config, [sdpa] * 2, seed=3)
    type(first).__mro__[2].save_pretrained(first, tmp_path)
    given = replace(config, options={**config.options, "folder": str(tmp_path), "weights": "given"})
    second = build_decoder(given, [sdpa] * 2, seed=4)
    assert first.state_dict().keys() == second.state_dict().keys()
    for name, weight in first.state_dict().items():
        assert torch.equal(weight, second.state_dict()[name]), name
    third = build_decoder(given.drawn(), [sdpa] * 2, seed=4)
    assert not torch.equal(third.lm_head.weight, second.lm_head.weight)
    with pytest.raises(ValueError, match=r"causal language model of transformers .* OSError"):
        build_decoder(
            replace(given, options={**given.options, "folder": str(tmp_path / "no")}), [sdpa] * 2
        )


@pytest.mark.parametrize(
    "config", [own(), huggingface(tie_word_embeddings=True)], ids=["own", "huggingface"]
)
def test_shared_weights_are_in_the_state_once_and_come_back(config):
    class Outer(nn.Module):
        def __init__(self, seed):
            super().__init__()
            self.model = build_decoder(config, [sdpa] * 2, seed=seed)

    first, second = Outer(0), Outer(1)
    state = first.state_dict()
    assert len(state) == len(dict(first.named_parameters()))
    second.load_state_dict(state)  # strict
    tokens = torch.arange(12)[None]
    assert torch.equal(first.model(tokens), second.model(tokens))


def test_the_rates_of_rotary_positions_stay_in_fp32():
    model = build_decoder(huggingface(), [sdpa] * 2)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to(torch.bfloat16)
    assert model.lm_head.weight.dtype == torch.bfloat16
    assert before
    for name, buffer in model.named_buffers():
        assert buffer.dtype == torch.float32
        assert torch.equal(buffer, before[name])


@pytest.mark.parametrize("config", [own(), huggingface()], ids=["own", "huggingface"])
def test_layers_have_names_whoever_built_them(config):
    model = build_decoder(config, [sdpa] * 2)
    assert list(blocks_of(model, 2)) == ["layer_0", "layer_1"]
    assert len(attentions_of(model)) == 2
    assert blocks_of(nn.Linear(2, 2), 2) == {}


@pytest.mark.parametrize("config", [own(), huggingface()], ids=["own", "huggingface"])
def test_a_scheme_draws_the_matrices_of_others_and_leaves_the_rest(config):
    model = build_decoder(config, [sdpa] * 2)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    initialise(model, 0, replace(config, init="orthogonal", init_std=0.5))
    for name, weight in model.state_dict().items():
        is_norm_or_bias = weight.dim() == 1
        assert torch.equal(weight, before[name]) == is_norm_or_bias, name
    squares = [x for x in model.state_dict().values() if x.dim() == 2 and len(x) == x.shape[1]]
    assert squares
    for matrix in squares:
        assert torch.allclose(matrix @ matrix.T, torch.eye(len(matrix)), atol=1e-5)
    same = {name: weight.clone() for name, weight in model.state_dict().items()}
    initialise(model, 5, config)  # its own
    assert all(torch.equal(weight, same[name]) for name, weight in model.state_dict().items())


def test_muon_takes_the_matrices_of_the_layers_of_others():
    chosen = OptimizerConfig(name="muon")
    model = build_decoder(huggingface(model_type="gpt2", n_layer=2, n_embd=32), [sdpa] * 2)
    muon, _ = build_optimizer(model, chosen)._parts
    inside = {id(p) for p in model.transformer.h.parameters() if p.dim() == 2}
    assert {id(p) for group in muon.param_groups for p in group["params"]} == inside
    with pytest.raises(ValueError, match="must not be 'muon' for a model without a ModuleList"):
        build_optimizer(nn.Sequential(nn.Linear(2, 2)), chosen)
