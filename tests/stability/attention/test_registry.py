"""Attention by name: what is resolved, and what is refused."""

import pytest
import torch
from torch.nn import functional as F

from attention_kernels import PROFILES, baseline_attention, flash_attention
from stability.attention.registry import IMPLEMENTATIONS, resolve_attention
from stability.config.load import PROFILES_OF
from stability.config.schema import AttentionConfig

CPU = torch.device("cpu")


def _inputs(heads=4, kv_heads=2):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(1, h, 20, 16, generator=generator).bfloat16()
        for h in (heads, kv_heads, kv_heads)
    ]


def test_names_resolve_to_the_functions_they_stand_for():
    q, k, v = _inputs()
    numerics = PROFILES["all_bf16"].with_(block_k=16)
    flash = AttentionConfig(implementation="flash", profile="all_bf16", numerics={"block_k": 16})
    expected = [
        (flash, flash_attention(q, k, v, causal=True, numerics=numerics)),
        (AttentionConfig(), baseline_attention(q, k, v, causal=True)),
        (
            AttentionConfig(implementation="sdpa"),
            F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        ),
    ]
    for config, out in expected:
        assert torch.equal(resolve_attention(config, CPU)(q, k, v, causal=True), out)


def test_auto_is_resolved_once_and_described():
    resolved = resolve_attention(AttentionConfig(implementation="flash"), CPU)
    assert resolved.name == "flash:fa2"
    assert resolved.description["engine"] == "twin"
    assert resolved.description["numerics"]["probabilities"] == "input"


def test_what_a_study_may_name_is_what_is_registered():
    assert set(PROFILES_OF) == set(IMPLEMENTATIONS)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (AttentionConfig(implementation="flsh"), "got 'flsh'; nearest: flash"),
        (AttentionConfig(implementation="flash", profile="fa22"), "got 'fa22'; nearest: fa2"),
        (
            AttentionConfig(implementation="flash", numerics={"blok_k": 32}),
            "no field 'blok_k'; nearest: block_k",
        ),
        (AttentionConfig(engine="triton"), "engine of baseline must be 'auto', got 'triton'"),
        (AttentionConfig(implementation="sdpa", profile="fa2"), "sdpa takes no profile"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(config, message):
    with pytest.raises(ValueError, match=message):
        resolve_attention(config, CPU)
