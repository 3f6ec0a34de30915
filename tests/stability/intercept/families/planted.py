"""Faults in one head of one attention of a candidate that is right everywhere else."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels import golden_attention

__all__ = ["FAULTS", "Planted"]

Fault = Callable[[Tensor, Tensor, Tensor, Tensor, dict[str, Any]], Tensor]
"""An attention that is wrong in the head for which the fourth argument is true."""


class Planted:
    """A candidate that is wrong in one head of the model's last attention, and right elsewhere.

    Candidates are called as the gradients arrive, so the last attention of a forward pass is the
    first call of a step. Whoever relies on it is told by the layer that is named.
    """

    def __init__(self, name: str, fault: Fault, head: int) -> None:
        self.__name__ = name
        self._fault = fault
        self._head = head
        self._is_first = True

    def begin_step(self) -> None:
        """Note that the next call is the first one of a step."""
        self._is_first = True

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        is_first, self._is_first = self._is_first, False
        if not is_first:
            return golden_attention(q, k, v, **mask).to(q.dtype)
        chosen = torch.zeros(q.shape[1], 1, 1, dtype=torch.bool)
        chosen[self._head] = True
        return self._fault(q, k, v, chosen, mask).to(q.dtype)


def scaled(factor: float) -> Fault:
    """Return the fault that multiplies the scores by `factor`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, mask: dict[str, Any]) -> Tensor:
        scale = (mask.get("scale") or q.shape[-1] ** -0.5) * factor
        right = golden_attention(q, k, v, **mask)
        return torch.where(chosen, golden_attention(q, k, v, **{**mask, "scale": scale}), right)

    return attend


def drop_last_key(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, mask: dict[str, Any]) -> Tensor:
    """Attend to all keys but the last; a query that sees no other one sees it all the same."""
    queries, keys = q.shape[2], k.shape[2]
    bias = torch.zeros(1, 1, queries, keys, dtype=torch.float64)
    bias[..., -1] = -1e3
    given = mask.get("attn_mask")
    if given is not None:
        bias = bias.masked_fill(~given, -torch.inf) if given.dtype == torch.bool else bias + given
    right = golden_attention(q, k, v, **mask)
    return torch.where(chosen, golden_attention(q, k, v, **{**mask, "attn_mask": bias}), right)


class _Gradient(torch.autograd.Function):
    """The identity; the gradient of a chosen part is off by a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grad: Tensor) -> tuple[Tensor, None]:
        return grad[0] * ctx.saved_tensors[0], None


def gradient(factor: float) -> Fault:
    """Return the fault that multiplies dq by `factor`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, chosen: Tensor, mask: dict[str, Any]) -> Tensor:
        wrong = 1 + (factor - 1) * chosen.to(q.dtype)
        return golden_attention(_Gradient.apply(q, wrong), k, v, **mask)

    return attend


FAULTS: dict[torch.dtype, dict[str, Fault]] = {
    torch.float32: {
        "scale_1.001": scaled(1.001),
        "last_key_dropped": drop_last_key,
        "dq_0.99": gradient(0.99),
    },
    torch.bfloat16: {
        "scale_1.02": scaled(1.02),
        "last_key_dropped": drop_last_key,
        "dq_0.99": gradient(0.99),
    },
}
"""By the dtype that attention computes in."""
