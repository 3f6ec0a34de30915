"""Clips gradients by their norm, which is summed exactly: no order and no layout changes a bit.

PyTorch's `clip_grad_norm_` adds squares up in an order of its own, and FSDP2 in another, so that
with active clipping two layouts of the same gradients would part there. Else this is the same rule:
each gradient times min(1, most / (norm + 1e-6)). Leaves out clipping by value, which has no sum.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist

from stability.metrics.exact_sums import ExactSum, gap_sum
from stability.metrics.pieces import pieces_of

__all__ = ["clip_by_norm", "exact_norm"]


def exact_norm(tensors: Iterable[Tensor]) -> float:
    """Return the 2-norm of all `tensors` as one vector, rounded once or twice; every rank must ask.

    Each value is counted once, whatever ranks it lies on; values are FP64 or narrower.
    """
    total = ExactSum()
    for piece in pieces_of({str(i): x for i, x in enumerate(tensors)}).values():
        squares = piece.values.detach().double().flatten().square()
        total += gap_sum(squares, torch.zeros_like(squares))
    if dist.is_initialized():
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, total)
        total = sum(found, ExactSum())
    return math.sqrt(float(total))


@torch.no_grad()
def clip_by_norm(parameters: Iterable[nn.Parameter], most: float) -> None:
    """Scale the gradients of `parameters`, in place, to a norm of `most` if theirs is larger."""
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return
    norm = exact_norm(gradients)
    for gradient in gradients:
        own: Any = gradient
        local = own.to_local() if hasattr(own, "to_local") else own
        factor = most / (torch.tensor(norm, dtype=local.dtype) + 1e-6)
        local.mul_(factor.clamp(max=1.0).to(local.device))
