"""A trial of what a run attends by, on its GPU, before anything is written.

Whether a kernel's tiles fit a GPU is known once it is compiled for it, forward and backward each:
without a trial a run would fail at its first step, and one whose shadow does not fit would train
for nothing. Leaves out how an attention is called in training (`attention_probe`).
"""

from collections.abc import Iterable

import torch

from stability.config.model import ModelConfig
from stability.config.precision import OPERANDS, Precision
from stability.model.precision import operand_dtype
from stability.probe.attention_registry import ResolvedAttention
from stability.probe.rounding_keys import RoundingKeys, keyed

__all__ = ["try_attention"]

_LENGTH = 256
"""Tokens at most: some blocks of keys, and a call that is soon done."""


def try_attention(
    attentions: Iterable[ResolvedAttention],
    model: ModelConfig,
    precision: Precision,
    device: torch.device,
) -> None:
    """Call each attention that Triton runs once with the model's heads, forward and backward.

    Others are left out: what they need is known to nobody here, and one that fails as a shadow is
    told of in training. ValueError, which names the attention, where its blocks do not fit the GPU.
    """
    dtype = operand_dtype(precision.default) if precision.default in OPERANDS else torch.float32
    length = min(model.context, _LENGTH)
    kv_heads = model.kv_heads or model.heads
    for attention in attentions:
        if attention.description.get("engine") != "triton":
            continue
        attend = keyed(attention, 0, RoundingKeys(seed=0))
        q, k, v = (
            torch.zeros(
                (1, heads, length, model.head_dim), dtype=dtype, device=device, requires_grad=True
            )
            for heads in (model.heads, kv_heads, kv_heads)
        )
        try:
            with torch.enable_grad():
                attend(q, k, v, causal=True).sum().backward()
        except ValueError as error:
            raise ValueError(f"{attention.name}: {error}") from error
