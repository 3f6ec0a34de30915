"""Attention by its definition, in a few lines that share nothing with the kernels.

It serves small FP64 inputs: nothing is subtracted before exp.
"""

import torch

__all__ = ["definition"]


def definition(q, k, v, *, attn_mask=0.0, causal=False, softcap=0.0, window=(None, None), **others):
    """exp(scores) v over the sum of exp(scores) and of the sink, by autograd.

    `weight`, which dropout makes, is a factor on each exp(scores), but not in the sum.
    """
    queries, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    k, v = (torch.stack([x] * group, dim=2).flatten(1, 2) for x in (k, v))
    scores = torch.einsum("bhqd,bhkd->bhqk", q, k) * others.get("scale", q.shape[3] ** -0.5)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - (keys - queries)
    scores = scores + attn_mask
    if "alibi_slopes" in others:
        scores = scores - others["alibi_slopes"][:, None, None] * ahead.abs()
    left, right = (keys + queries if x is None else x for x in window)
    seen = (ahead >= -left) & (ahead <= (0 if causal else right))
    seen = seen & others.get("key_padding", torch.ones(len(q), keys) > 0)[:, None, None]
    powers = torch.exp(scores) * seen
    sinks = others.get("sinks", torch.full((q.shape[1],), -torch.inf))
    total = powers.sum(-1) + torch.exp(sinks)[:, None]
    total = torch.where(total == 0, 1.0, total)
    powers = powers * others.get("weight", 1.0)
    return torch.einsum("bhqk,bhke->bhqe", powers, v) / total[..., None]
