"""The groups that parameters of our GPT and of the usual models fall into."""

import pytest

from stability.config.schema import ModelConfig
from stability.metrics.parameter_groups import PARAMETER_GROUPS, group_of, grouped
from stability.model.gpt import GPT

NAMES = {
    "model.embed_tokens.weight": "embedding",
    "model.layers.0.self_attn.q_proj.weight": "query",
    "model.layers.0.self_attn.k_proj.bias": "key",
    "model.layers.0.self_attn.v_proj.weight": "value",
    "model.layers.0.self_attn.o_proj.weight": "attention_out",
    "model.layers.0.self_attn.q_norm.weight": "norm",
    "model.layers.0.mlp.gate_proj.weight": "mlp",
    "model.layers.0.input_layernorm.weight": "norm",
    "model.norm.weight": "norm",
    "lm_head.weight": "embedding",
    "transformer.wte.weight": "embedding",
    "transformer.wpe.weight": "embedding",
    "transformer.h.0.ln_1.weight": "norm",
    "transformer.ln_f.bias": "norm",
    "transformer.h.0.attn.c_attn.weight": "qkv",
    "transformer.h.0.attn.c_proj.weight": "attention_out",
    "transformer.h.0.mlp.c_fc.weight": "mlp",
    "transformer.h.0.mlp.c_proj.weight": "mlp",
    "layers.0.self_attn.in_proj_weight": "qkv",
    "layers.0.self_attn.out_proj.bias": "attention_out",
    "layers.0.linear1.weight": "mlp",
    "layers.0.norm1.weight": "norm",
    "bert.encoder.layer.0.attention.self.query.weight": "query",
    "bert.encoder.layer.0.attention.output.dense.weight": "attention_out",
    "bert.encoder.layer.0.intermediate.dense.weight": "mlp",
    "head.weight": "other",
}


@pytest.mark.parametrize("name", NAMES)
def test_a_parameter_is_in_its_group(name):
    assert group_of(name) == NAMES[name]


def test_our_gpt_has_seven_groups_that_hold_each_parameter_once():
    config = ModelConfig(depth=2, width=8, heads=2, context=4, qk_norm=True)
    names = [name for name, _ in GPT(config, [None] * 2).named_parameters()]
    found = grouped(names)
    assert list(found) == [
        "norm",
        "embedding",
        "query",
        "key",
        "value",
        "attention_out",
        "mlp",
    ]
    assert list(found) == [group for group in PARAMETER_GROUPS if group in found]
    assert sorted(name for members in found.values() for name in members) == sorted(names)
    assert found["query"] == [
        f"blocks.layer_{i}.query.{kind}" for i in (0, 1) for kind in ("weight", "bias")
    ]
