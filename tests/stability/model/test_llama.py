"""Llama's shape: its numbers are those of `LlamaForCausalLM`, and init schemes know its parts."""

import math

import pytest
import torch
import transformers
from torch.nn import functional as F

from stability.config.schema import ModelConfig
from stability.model.initial_weights import initialise
from stability.model.llama import Llama, mlp_width_of, rotated
from stability.probe.double_precision import InDouble

NAMES = {
    "token_embedding": "model.embed_tokens",
    "final_norm": "model.norm",
    "lm_head": "lm_head",
    "attention_norm": "input_layernorm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "attention_residual": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp_gate": "mlp.gate_proj",
    "mlp_up": "mlp.up_proj",
    "mlp_residual": "mlp.down_proj",
    "query_norm": "self_attn.q_norm",
    "key_norm": "self_attn.k_norm",
}
SHAPE = {"depth": 2, "width": 64, "heads": 4, "kv_heads": 2, "context": 48, "vocab_size": 96}


def sdpa(q, k, v, *, causal, scale=None):
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


def ours(dtype=torch.float64, **changes):
    config = ModelConfig(builder="llama", **{**SHAPE, "init_std": 0.2, **changes})
    model = Llama(config, [sdpa] * config.depth)
    initialise(model, 0)
    with torch.no_grad():
        generator = torch.Generator().manual_seed(1)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # scales of 1 would hide one that is left out
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype)


def theirs(model, dtype=torch.float64):
    """`model` in transformers, with the same weights; attention, norms and angles in `dtype`."""
    shape = model.config
    kind, options = transformers.LlamaForCausalLM, {"attention_bias": False}
    config_kind = transformers.LlamaConfig
    if shape.qk_norm:
        kind, config_kind = transformers.Qwen3ForCausalLM, transformers.Qwen3Config
        options["head_dim"] = shape.head_dim
    config = config_kind(
        num_hidden_layers=shape.depth,
        hidden_size=shape.width,
        intermediate_size=mlp_width_of(shape),
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.context,
        vocab_size=shape.vocab_size,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": shape.option("rope_theta")},
        tie_word_embeddings=shape.option("tied"),
        attn_implementation="sdpa",
        bos_token_id=None,
        eos_token_id=None,
        **options,
    )
    with torch.device("cpu"):
        other = kind(config).to(dtype)
    other.load_state_dict({renamed(n): x for n, x in model.state_dict().items()}, strict=False)
    other.tie_weights()
    return other


def renamed(name):
    parts = name.split(".")
    if parts[0] == "blocks":
        index = parts[1].removeprefix("layer_")
        return f"model.layers.{index}.{NAMES[parts[2]]}.{parts[3]}"
    return f"{NAMES[parts[0]]}.{parts[1]}"


def results(model, tokens, call):
    logits = call(tokens)
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
    loss.backward()
    return logits.detach(), {n: p.grad for n, p in model.named_parameters()}


def tokens():
    return torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"options": {"rope_theta": 500000.0, "mlp_width": 80}},
        {"options": {"tied": True}, "kv_heads": 4},
        {"qk_norm": True},
    ],
    ids=["gqa", "theta", "tied", "qk_norm"],
)
def test_logits_and_gradients_in_fp64_are_those_of_transformers(changes):
    model = ours(**changes)
    logits, gradients = results(model, tokens(), model)
    with InDouble():
        other = theirs(model)
        if changes.get("options", {}).get("tied"):
            assert other.lm_head.weight is other.model.embed_tokens.weight
        expected, others = results(other, tokens(), lambda x: other(input_ids=x).logits)
    # sums of at most 64 terms through 2 layers: some hundred roundings of 1.1e-16
    assert (logits - expected).abs().max() < 1e-12 * expected.abs().max()
    assert {renamed(name) for name in gradients} == set(others)
    for name, gradient in gradients.items():
        expected = others[renamed(name)]
        assert (gradient - expected).abs().max() < 1e-12 * expected.abs().max(), name
        assert expected.abs().max() > 0, name


def test_in_fp32_it_errs_no_more_than_transformers_does():
    model = ours()
    golden, golden_gradients = results(model, tokens(), model)
    narrow = ours(torch.float32)
    logits, gradients = results(narrow, tokens(), narrow)
    other = theirs(narrow, torch.float32)
    others_logits, others = results(other, tokens(), lambda x: other(input_ids=x).logits)

    # both round as often; which order a sum has moves its error by less than a factor of 2
    def error(x, exact):
        return ((x.double() - exact).norm() / exact.norm()).item()

    assert error(logits, golden) <= 2 * error(others_logits, golden) + 2.0**-24
    for name, exact in golden_gradients.items():
        theirs_error = error(others[renamed(name)], exact)
        assert error(gradients[name], exact) <= 2 * theirs_error + 2.0**-24, name


def test_scores_depend_on_the_distance_of_two_tokens_alone():
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 1, 1, 32, dtype=torch.float64, generator=generator)
    rates = 10000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32)

    def score(i, j):
        place = torch.tensor([[float(i)], [float(j)]], dtype=torch.float64)
        at_q, at_k = (rotated(x, p * rates) for x, p in zip((q, k), place[:, None], strict=True))
        return (at_q * at_k).sum().item()

    # |q| |k| is about 32, and an angle of 1000 is rounded by 1.1e-13
    assert score(7, 3) == pytest.approx(score(1004, 1000), abs=1e-11)
    assert abs(score(7, 3) - score(3, 7)) > 1e-3, "the direction counts"


def test_angles_are_exact_in_bf16_as_well():
    model = ours(torch.bfloat16)
    angles = model._angles(torch.zeros(1, 48, dtype=torch.int64))
    assert angles.dtype == torch.float64
    assert angles[47, 0] == 47.0
    assert angles.shape == (48, 8)


def test_init_schemes_know_the_parts():
    config = ModelConfig(builder="llama", **{**SHAPE, "width": 256})
    model = Llama(config, [sdpa] * 2)
    initialise(model, 0)
    block = model.blocks["layer_0"]
    assert model.token_embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.lm_head.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp_gate.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for residual in (block.attention_residual, block.mlp_residual):
        assert residual.weight.std().item() == pytest.approx(0.02 / math.sqrt(4), rel=0.05)
    assert (block.attention_norm.weight == 1).all()


def test_dropout_draws_in_training_alone():
    model = ours(dropout=0.5)
    torch.manual_seed(0)
    first, second = model(tokens()), model(tokens())
    assert not torch.equal(first, second)
    model.eval()
    assert torch.equal(model(tokens()), model(tokens()))


def test_what_it_can_not_compute_is_refused():
    config = ModelConfig(builder="llama", **SHAPE)
    with pytest.raises(ValueError, match=r"Llama: attention must hold one function a layer \(2\)"):
        Llama(config, [sdpa])
    with pytest.raises(ValueError, match=r"tokens must be at most 48 long, got \(1, 49\)"):
        Llama(config, [sdpa] * 2)(torch.zeros(1, 49, dtype=torch.int64))
