"""Clips gradients by their norm, which is summed exactly: no order and no layout changes a bit.

PyTorch's `clip_grad_norm_` adds squares up in an order of its own, and FSDP2 in another, so that
with active clipping two layouts of the same gradients would part there. Else this is the same rule:
each gradient times min(1, most / (norm + 1e-6)). Leaves out clipping by value, which has no sum.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from stability.metrics.sharded_sums import norm_of

__all__ = ["clip_by_norm"]


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale the gradients of `parameters`, in place, to a norm of `most` if theirs is larger."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    norm = norm_of(gradients)
    for gradient in gradients:
        own: Any = gradient
        local = own.to_local() if hasattr(own, "to_local") else own
        factor = most / (torch.tensor(norm, dtype=local.dtype) + 1e-6)
        local.mul_(factor.clamp(max=1.0).to(local.device))
