"""Initial weights: the laws they are drawn from, and the seed that alone decides them."""

import math
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from stability.config.schema import INIT_SCHEMES, ModelConfig
from stability.metrics.mixing import key_of
from stability.model.decoder_parts import shared_state
from stability.model.gpt import GPT
from stability.model.index_stream import normal_at, sign_at, uniform_at
from stability.model.initial_weights import initialise, nudge_weights
from stability.model.llama import Llama
from stability.recorder.inside.nudge import nudge_weights as recorder_nudge

CONFIG = ModelConfig(depth=3, width=128, heads=4, context=64)


def _weights(scheme, seed=0, dtype=torch.float32, **changes):
    config = replace(CONFIG, init=scheme, **changes)
    model = GPT(config, [F.scaled_dot_product_attention] * config.depth).to(dtype)
    initialise(model, seed)
    return {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_the_seed_alone_decides(scheme):
    first, again, other = _weights(scheme), _weights(scheme), _weights(scheme, seed=1)
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        drawn = value.dim() == 2
        assert torch.equal(value, other[name]) != drawn, name


def test_a_wider_dtype_holds_the_same_values():
    single, double = _weights("gpt2"), _weights("gpt2", dtype=torch.float64)
    for name, value in single.items():
        assert torch.equal(value.double(), double[name]), name


@pytest.mark.parametrize(
    ("scheme", "query", "residual"),
    [
        ("gpt2", 0.02, 0.02 / math.sqrt(2 * 3)),
        ("xavier", math.sqrt(2 / (128 + 128)), math.sqrt(2 / (128 + 512))),
        ("kaiming", math.sqrt(2 / 128), math.sqrt(2 / 512)),
        ("orthogonal", math.sqrt(1 / 128), math.sqrt(1 / 512)),
    ],
)
def test_matrices_have_the_scheme_s_spread(scheme, query, residual):
    weights = _weights(scheme)
    # the spread of n values is known to 1/sqrt(2n): 0.6 % for the smallest matrix; five of these
    assert weights["blocks.layer_1.query.weight"].std() == pytest.approx(query, rel=0.03)
    assert weights["blocks.layer_1.mlp_residual.weight"].std() == pytest.approx(residual, rel=0.03)
    assert weights["token_embedding.weight"].std() == pytest.approx(0.02, rel=0.03)
    assert weights["position_embedding.weight"].std() == pytest.approx(0.02, rel=0.04)


def test_orthogonal_matrices_are_orthogonal():
    up = _weights("orthogonal")["blocks.layer_0.mlp_up.weight"].double()
    assert torch.allclose(up.T @ up, torch.eye(128, dtype=torch.float64), atol=1e-5)


@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_biases_are_zero_and_norms_are_one(scheme):
    for name, value in _weights(scheme).items():
        if name.endswith("bias"):
            assert (value == 0).all(), name
        elif value.dim() == 1:
            assert (value == 1).all(), name


def test_no_two_layers_share_their_draw():
    weights = _weights("gpt2")
    layers = [weights[f"blocks.layer_{i}.query.weight"] for i in range(3)]
    assert all(not torch.equal(a, b) for a, b in pairwise(layers))


def test_an_unknown_scheme_is_told_which_there_are():
    with pytest.raises(ValueError, match=r"must be gpt2, xavier, .* got .xavir"):
        replace(CONFIG, init="xavir")


@pytest.mark.parametrize("scheme", [x for x in INIT_SCHEMES if x != "orthogonal"])
def test_a_weight_s_draw_depends_on_its_name_and_place_alone(scheme):
    """Neither the layers before it nor the rows behind it move it."""
    plain, deep = _weights(scheme), _weights(scheme, depth=5, vocab_size=600)
    name = "blocks.layer_2.query.weight"
    assert torch.equal(plain[name], deep[name])
    embedding = plain["token_embedding.weight"]
    assert torch.equal(embedding, deep["token_embedding.weight"][: len(embedding)])


def test_numbers_by_place_are_those_of_the_scheme():
    """Each matrix against one drawn here, from the numbers alone."""
    name = "blocks.layer_1.mlp_up.weight"
    count = 512 * 128
    places = torch.arange(count)
    z, u = (at(key_of("init", 4, name), places) for at in (normal_at, uniform_at))
    wanted = {
        "gpt2": 0.02 * z,
        "kaiming": math.sqrt(2 / 128) * z,
        "xavier": math.sqrt(6 / (128 + 512)) * (2 * u - 1),
    }
    for scheme, values in wanted.items():
        found = _weights(scheme, seed=4)[name]
        assert torch.equal(found, values.float().view(512, 128)), scheme


def test_an_orthogonal_matrix_turns_what_was_drawn():
    """By Gram and Schmidt: of the columns, in order, each less its part along those before it."""
    up = _weights("orthogonal")["blocks.layer_0.mlp_up.weight"].double()
    key = key_of("init", 0, "blocks.layer_0.mlp_up.weight")
    drawn = normal_at(key, torch.arange(up.numel())).view(up.shape)
    triangle = up.T @ drawn
    assert triangle.tril(-1).abs().max() < 1e-4
    assert (triangle.diagonal() > 0).all()


def test_another_spread_scales_the_same_draws():
    plain, wide = _weights("gpt2"), _weights("gpt2", init_std=0.04)
    for name, value in plain.items():
        # 0.04 / 0.02 is exactly 2, and so is what is drawn with it
        assert torch.equal(wide[name], 2 * value if value.dim() == 2 else value), name


OWN = """
import torch

def ramp(matrix, generator):
    matrix.copy_(torch.rand(matrix.shape, generator=generator) + torch.rand(1))

def half(matrix, generator):
    matrix[0] = 1.0
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "own_inits.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)


def test_a_scheme_of_one_s_own_fills_the_matrices_by_the_seed_alone(own):
    first = _weights("own_inits:ramp", seed=3)
    torch.rand(5)
    state = torch.get_rng_state()
    again, other = _weights("own_inits:ramp", seed=3), _weights("own_inits:ramp", seed=4)
    assert torch.equal(torch.get_rng_state(), state), "the global generator moved"
    for name, value in first.items():
        assert torch.equal(value, again[name]), name
        assert torch.equal(value, other[name]) != (value.dim() == 2), name
    assert first["blocks.layer_0.query.weight"].min() > 0
    assert first["token_embedding.weight"].min() < 0, "embeddings are drawn as in every scheme"


def test_a_scheme_that_fills_no_whole_matrix_is_refused(own):
    with pytest.raises(ValueError, match=r"own_inits:half must fill each matrix in place"):
        _weights("own_inits:half")
    with pytest.raises(ValueError, match=r"model.init must be .* nearest: half"):
        _weights("own_inits:halv")


def _nudged(seed: int, draw: int) -> torch.Tensor:
    model = nn.Linear(40, 40)
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    nudge_weights(model, 1, seed, draw)
    return model.weight > 1


def test_a_coin_is_decided_by_the_weight_s_name_and_place_alone():
    """The same as the recorder's, and in a model with other tensors before it."""
    coin = _nudged(3, 1)
    state = {"weight": nn.Parameter(torch.ones(40, 40))}
    recorder_nudge(state, 1, 3, 1)
    assert torch.equal(state["weight"] > 1, coin)
    deep = nn.ModuleDict({"a": nn.Linear(3, 5), "weight_of": nn.Linear(40, 40)})
    deep.register_parameter("weight", nn.Parameter(torch.ones(40, 40)))
    nudge_weights(deep, 1, 3, 1)
    assert torch.equal(deep.weight > 1, coin)


def test_coins_of_a_large_tensor_are_one_stream():
    """The recorder draws them in portions, of which none is another's again."""
    count = 2**21 + 5
    state = {"w": nn.Parameter(torch.ones(count))}
    recorder_nudge(state, 1, 0, 0)
    assert torch.equal(state["w"] > 1, sign_at(key_of("nudge", 0, 0, "w"), torch.arange(count)) > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_nudge_is_of_as_many_units_as_it_says(dtype):
    model = nn.Linear(8, 8).to(dtype)
    nn.init.constant_(model.weight, 1.5)
    nn.init.zeros_(model.bias)
    nudge_weights(model, 3, seed=0)
    assert set(((model.weight - 1.5).abs() / torch.finfo(dtype).eps).flatten().tolist()) == {3.0}
    # the third subnormal, up or down
    least = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    assert set((model.bias.double().abs() / least).tolist()) == {3.0}
    before = {name: value.clone() for name, value in model.state_dict().items()}
    nudge_weights(model, 0, seed=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_each_draw_of_each_seed_is_another_coin():
    coins = [_nudged(seed, draw) for seed in (0, 1, 2) for draw in (0, 1, 2)]
    # two independent coins agree in half of 1,600 weights, give or take 1.25 %: five of these
    for first, second in combinations(coins, 2):
        assert (first == second).double().mean().item() == pytest.approx(0.5, abs=0.0625)


@pytest.mark.parametrize("builder", ["gpt2", "llama"])
@pytest.mark.parametrize("scheme", INIT_SCHEMES)
def test_norms_of_q_and_k_leave_the_draws_of_all_others_as_they_are(builder, scheme):
    states = []
    for qk_norm in (False, True):
        config = replace(CONFIG, builder=builder, init=scheme, qk_norm=qk_norm)
        build = GPT if builder == "gpt2" else Llama
        model = build(config, [F.scaled_dot_product_attention] * 3)
        initialise(model, seed=3)
        states.append((model.state_dict(), shared_state(model)))
    (plain, all_of_it), (normed, shared) = states
    assert len(normed) == len(plain) + 6
    assert list(shared) == list(all_of_it) == list(plain)
    for name, value in plain.items():
        assert torch.equal(value, shared[name]), name
