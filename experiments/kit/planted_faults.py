"""Attentions that are wrong on purpose, to see what a rule of acceptance lets pass.

Each is profile fa2 with one mistake that a kernel could have; arguments are those of a packed,
causal `flash_attention`. Leaves out the rules.
"""

import itertools
from typing import Any

import torch
from torch import Tensor

from attention_kernels import flash_attention

__all__ = ["last_key_skipped", "scale_off"]


def last_key_skipped(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """Attend as a kernel whose loop over keys ends one key early in each sequence."""
    outs = []
    starts = [mask[name].tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    for rows, keys in zip(*map(itertools.pairwise, starts), strict=True):
        parts = ((q, rows), (k, keys), (v, keys))
        one = [x[start:end].transpose(0, 1)[None] for x, (start, end) in parts]
        seen = torch.arange(*keys, device=q.device)[None] < keys[1] - 1
        outs.append(flash_attention(*one, causal=True, key_padding=seen)[0].transpose(0, 1))
    return torch.cat(outs)


def scale_off(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
    """Attend with a scale that is 1 % too large."""
    return flash_attention(q, k, v, scale=1.01 * q.shape[-1] ** -0.5, **mask)
