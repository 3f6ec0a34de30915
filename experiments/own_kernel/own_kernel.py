"""A kernel of one's own, as a user would write it: attention over blocks of keys.

`attend` is right; `attend_without_tail` has a bug that real kernels have had: one head skips the
last block of keys where it is not full. `worst_row` is a metric of one's own.
"""

import math

import torch
from torch import Tensor

BLOCK = 32


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """Return attention, typed as q, of v's head_dim; heads of q may share one of k and v (GQA)."""
    # what computes inside a fused kernel is no autocast's affair, so it is none of these products'
    with torch.autocast(q.device.type, enabled=False):
        return _attend(q, k, v, causal, scale, skips_tail_in=None)


def attend_without_tail(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return what `attend` does, save that head 1 never sees keys of a last block that is short."""
    with torch.autocast(q.device.type, enabled=False):
        return _attend(q, k, v, causal, scale, skips_tail_in=1)


def worst_row(x: Tensor, reference: Tensor, valid: Tensor | None) -> Tensor:
    """Return the largest error of a row, relative to the row's own norm."""
    error = (x.double() - reference.double()).norm(dim=-1)
    ratio = error / reference.double().norm(dim=-1).clamp(min=1e-30)
    return (ratio if valid is None else ratio.masked_fill(~valid, 0.0)).max()


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    skips_tail_in: int | None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    wide = torch.promote_types(q.dtype, torch.float32)
    rows = torch.arange(q.shape[2], device=q.device).unsqueeze(1) + k.shape[2] - q.shape[2]
    largest = torch.full((*q.shape[:3], 1), -torch.inf, dtype=wide, device=q.device)
    total = torch.zeros_like(largest)
    out = torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide, device=q.device)
    scaled = q.to(wide) * (scale or 1 / math.sqrt(q.shape[-1]))
    for start in range(0, k.shape[2], BLOCK):
        keys = torch.arange(start, min(start + BLOCK, k.shape[2]), device=q.device)
        scores = scaled @ k[:, :, keys].to(wide).mT
        hidden = (keys > rows) if causal else torch.zeros_like(scores[0, 0], dtype=torch.bool)
        hidden = hidden.expand_as(scores).clone()
        if skips_tail_in is not None and start > 0 and len(keys) < BLOCK:
            hidden[:, skips_tail_in : skips_tail_in + 1] = True
        scores = scores.masked_fill(hidden, -torch.inf)
        # detached: what flows back through the maxima is 0, but for rounding errors
        new = torch.maximum(largest, scores.detach().amax(dim=-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0.0)
        p, keep = torch.exp(scores - shift), torch.exp(largest - shift)
        total = total * keep + p.sum(dim=-1, keepdim=True)
        out = out * keep + p @ v[:, :, keys].to(wide)
        largest = new
    # a row that sees no key gives 0
    return (out / total.masked_fill(total == 0, 1.0)).to(q.dtype)
