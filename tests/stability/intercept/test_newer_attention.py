"""Attention as newer models have it: sinks, and values of a head_dim of their own."""

import copy

import pytest
import torch
import transformers

from attention_kernels import golden_attention
from stability import shadow

SIZES = {
    "vocab_size": 40,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _gpt_oss():
    config = transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=2, num_experts_per_tok=1, sliding_window=4
    )
    model = transformers.GptOssForCausalLM(config)
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.self_attn.sinks)
    return model


def _deepseek():
    config = transformers.DeepseekV3Config(
        **SIZES,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=24,
        first_k_dense_replace=2,
    )
    return transformers.DeepseekV3ForCausalLM(config)


def _results(build):
    return ("out", "dq", "dk", "dv", *(["dsinks"] if build is _gpt_oss else []))


def _train(model):
    ids = 1 + torch.arange(24).reshape(2, 12)  # not 0, whose embedding is 0
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[1, :3] = 0
    labels = ids.clone()
    labels[1, :4] = -100  # the last padded row would predict the first token
    loss = model(input_ids=ids, attention_mask=padding, labels=labels).loss
    loss.backward()
    return loss


@pytest.mark.parametrize("build", [_gpt_oss, _deepseek])
@pytest.mark.parametrize("candidate", ["flash:golden", "planted"])
def test_every_layer_is_looked_at_right_and_changed_by_nothing(build, candidate):
    def planted(q, k, v, *, causal, scale=None, attn_mask=None, sinks=None):
        out = golden_attention(
            q, k, v, causal=causal, scale=scale, attn_mask=attn_mask, sinks=sinks
        )
        return (out * torch.tensor([1, 1.001])[:, None, None]).to(q.dtype)

    torch.manual_seed(0)
    model = build()
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    _train(plain)
    with shadow(model, planted if candidate == "planted" else candidate, heads=True) as probe:
        _train(model)
        probe.step()
    for own, watched in zip(plain.parameters(), model.parameters(), strict=True):
        assert own.grad is None or torch.equal(own.grad, watched.grad)
    layers = tuple(f"model.layers.{i}.self_attn" for i in range(2))
    assert probe.layers == layers
    assert not probe.findings
    for layer in layers:
        for what in _results(build):
            name = f"deviation/{layer}/{what}/golden_baseline_rel_fro"
            assert probe.metrics[name] < 1e-5, what
        gains = [probe.metrics[f"deviation/{layer}/head_{i}/out/gain"] for i in range(2)]
        assert gains == pytest.approx([0, 1e-3 if candidate == "planted" else 0], abs=1e-5)


def test_a_wrong_gradient_of_the_sinks_is_named_at_its_head():
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, *grads):
            return grads[0] * torch.tensor([1, 1.01], dtype=grads[0].dtype)

    def attend(q, k, v, *, causal, scale=None, attn_mask=None, sinks=None):
        options = {"causal": causal, "scale": scale, "attn_mask": attn_mask}
        return golden_attention(q, k, v, sinks=Wrong.apply(sinks), **options).to(q.dtype)

    torch.manual_seed(0)
    model = _gpt_oss()
    model.set_attn_implementation("eager")
    with shadow(model, attend, heads=True, positions=2) as probe:
        _train(model)
        probe.step()
    for layer in probe.layers:
        for what in _results(_gpt_oss):
            gains = [probe.metrics[f"deviation/{layer}/head_{i}/{what}/gain"] for i in range(2)]
            wrong = 0.01 if what == "dsinks" else 0
            assert gains == pytest.approx([0, wrong], abs=1e-5), what
    assert not probe.findings
    assert all(
        isinstance(layer.self_attn.sinks, torch.nn.Parameter) for layer in model.model.layers
    )


def test_sinks_that_are_trained_are_replaced_whole_or_not():
    torch.manual_seed(0)
    model = _gpt_oss()
    model.set_attn_implementation("eager")
    plain = copy.deepcopy(model)
    _train(plain)
    with shadow(model, "flash:golden", replace=["*self_attn"]) as probe:
        _train(model)
        probe.step()
    own, replaced = (m.model.layers[0].self_attn.sinks.grad for m in (plain, model))
    assert (own - replaced).norm() / own.norm() < 1e-4
    with (
        pytest.raises(ValueError, match="direction must be 'both' where sinks are trained"),
        shadow(model, "flash:golden", replace=["*self_attn"], direction="forward"),
    ):
        _train(model)
