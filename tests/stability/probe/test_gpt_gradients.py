"""A whole GPT through flash attention in FP64 is the GPT through plain attention."""

import pytest
import torch

from attention_kernels import BASELINE_PROFILES, PROFILES, baseline_attention, flash_attention
from stability.config.schema import ModelConfig
from stability.model.gpt import GPT
from stability.model.initial_weights import initialise


def _plain(q, k, v, *, causal, scale=None):
    golden = BASELINE_PROFILES["golden"]
    return baseline_attention(q, k, v, causal=causal, scale=scale, numerics=golden)


def _flash(q, k, v, *, causal, scale=None):
    golden = PROFILES["golden"].with_(block_q=16, block_k=16)
    return flash_attention(q, k, v, causal=causal, scale=scale, numerics=golden)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_gradients_of_the_gpt_agree_with_plain_attention_to_1e_10(qk_norm):
    config = ModelConfig(
        depth=3, width=120, heads=6, kv_heads=2, context=50, qk_norm=qk_norm, init="xavier"
    )
    tokens = torch.randint(0, 256, (2, 50), generator=torch.Generator().manual_seed(0))
    gradients = []
    for attention in (_plain, _flash):
        model = GPT(config, [attention] * 3)
        initialise(model, 0)
        model.double()
        model(tokens).logsumexp(-1).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, plain in gradients[0].items():
        error = (gradients[1][name] - plain).norm() / plain.norm().clamp_min(1e-30)
        assert plain.abs().max() > 0, name
        assert error < 1e-10, name
