"""Attentions that are right, each with the dtypes at which it is.

Right means an error of at most 1.6 times plain attention's in the same dtype, forward and backward.
Not every good kernel is right everywhere: FlashAttention-4's polynomial for exp2 has a relative
error of 8.8e-5, invisible in BF16 and FP16 and 1,500 roundings of FP32. A re-implementation all in
BF16 is right nowhere, and so not here.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels import PROFILES, attention, baseline_attention, flash_attention
from attention_kernels.api import golden_attention
from attention_kernels.masks import MaskArguments
from tests.zoo.flash_by_hand import Flash

__all__ = ["ALL", "NARROW", "RIGHT", "Right"]

NARROW = (torch.bfloat16, torch.float16)
ALL = (*NARROW, torch.float32)


class Right(NamedTuple):
    """A right attention, `function(q, k, v, *, causal, scale=None)`, and where it is right."""

    name: str
    function: Callable[..., Any]
    dtypes: tuple[torch.dtype, ...]


def _golden(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    return golden_attention(q, k, v, **mask).to(q.dtype)


def naive(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Attend in five lines of PyTorch, in FP32 with weights in q's dtype; autograd's backward."""
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = scale * (q.float() @ k.float().mT)
    if causal:
        hidden = torch.ones_like(scores[0, 0], dtype=torch.bool)
        hidden = hidden.triu(k.shape[2] - q.shape[2] + 1)
        scores = scores.masked_fill(hidden, -torch.inf)
        # a row that attends nothing: any finite score, and then weights of 0
        scores = scores.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    weights = torch.softmax(scores, -1)
    if causal:
        weights = weights.masked_fill(hidden, 0.0)
    return (weights @ v.float()).to(q.dtype)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Attend by PyTorch's own choice of kernel; a causal mask is bottom-right."""
    visible = None
    if causal and q.shape[2] != k.shape[2]:
        visible = torch.ones(q.shape[2], k.shape[2]).tril(k.shape[2] - q.shape[2]).bool()
    out = F.scaled_dot_product_attention(
        q, k, v, visible, is_causal=causal and visible is None, scale=scale, enable_gqa=True
    )
    return out if visible is None else out.masked_fill(~visible.any(-1, keepdim=True), 0.0)


def by_hand(block_q: int, block_k: int) -> Flash:
    """Return the flash attention written by hand in a tile of its own."""
    kernel = Flash()
    kernel.block_q, kernel.block_k = block_q, block_k
    return kernel


def flash(profile: str, **numerics: Any) -> Callable[..., Any]:
    """Return the library's flash attention at a profile."""
    return partial(flash_attention, numerics=PROFILES[profile].with_(**numerics))


RIGHT: tuple[Right, ...] = (
    Right("baseline", baseline_attention, ALL),
    Right("golden", _golden, ALL),
    Right("flash:golden", flash("golden"), ALL),
    Right("flash:fa1", flash("fa1"), ALL),
    Right("flash:fa2", flash("fa2"), ALL),
    Right("flash:fa3", flash("fa3"), ALL),
    Right("flash:fa4", flash("fa4"), NARROW),
    Right("flash:fa2, tile 16x16", flash("fa2", block_q=16, block_k=16), ALL),
    Right("flash:fa2, tile 32x128", flash("fa2", block_q=32, block_k=128), ALL),
    Right("flash:fa2, tile 128x32", flash("fa2", block_q=128, block_k=32), ALL),
    Right("flash:fa2, keys reversed", flash("fa2", key_order="reversed"), ALL),
    Right("flash:fa2, P in FP32", flash("fa2", probabilities="fp32"), ALL),
    Right("sdpa", _sdpa, ALL),
    Right("sdpa:math", partial(attention, implementation="sdpa:math"), ALL),
    Right("sdpa:flash", partial(attention, implementation="sdpa:flash"), ALL),
    Right("naive", naive, ALL),
    Right("by hand", Flash(), ALL),
    Right("by hand, tile 16x64", by_hand(16, 64), ALL),
    Right("by hand, tile 48x24", by_hand(48, 24), ALL),
)
"""Of `MaskArguments` each takes at least causal and scale."""

assert {"causal", "scale"} <= set(MaskArguments.__annotations__)
