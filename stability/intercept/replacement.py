"""Makes another attention compute in the place of the model's own: all of it, or one direction.

To bisect a failure: the candidate's forward with the model's own gradients, or the other way round.
Leaves out which calls are caught (`intercept_*`) and looking at them (`probe`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Unpack, get_args

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels import MaskArguments
from stability.probe.captured_call import AttentionCall, Primary
from stability.probe.registry import MaskedAttention, ResolvedAttention

__all__ = ["Direction", "Replacement"]

Direction = Literal["both", "forward", "backward"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Replacement:
    """`candidate` in the layers whose names match one of the globs `layers`."""

    candidate: ResolvedAttention
    layers: Sequence[str]
    direction: Direction = "both"

    def __post_init__(self) -> None:
        if self.direction not in get_args(Direction):
            raise ValueError(
                f"Replacement: direction must be one of {', '.join(get_args(Direction))}, got "
                f"{self.direction!r}"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return where and how it replaces, as JSON values."""
        return {"layers": list(self.layers), "direction": self.direction}

    def covers(self, layer: str) -> bool:
        """Whether the attention of `layer` is replaced."""
        return any(fnmatchcase(layer, pattern) for pattern in self.layers)

    def of(self, call: AttentionCall, primary: Primary) -> Primary:
        """Return what computes `call` instead of `primary`.

        ValueError for a call that the candidate cannot take the place in, e.g. with dropout.
        """
        if call.unsupported:
            raise ValueError(
                f"Replacement: {call.layer} must be a call that {self.candidate.name} can take, "
                f"got {call.unsupported}"
            )
        candidate = _Cast(MaskedAttention(self.candidate, call.mask), call.dtype)
        if self.direction == "both":
            return candidate
        own = _Autocast(primary, call)
        pair = (candidate, own) if self.direction == "forward" else (own, candidate)
        return _Split(*pair)

    def mixed(self, own: ResolvedAttention) -> ResolvedAttention:
        """Return the attention of a covered layer: the candidate, or one direction of it."""
        if self.direction == "both":
            return self.candidate
        pair = (self.candidate, own) if self.direction == "forward" else (own, self.candidate)

        def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Unpack[MaskArguments]) -> Tensor:
            forward, backward = (MaskedAttention(attention, mask) for attention in pair)
            return _Split(forward, backward)(q, k, v)

        description = {**self.candidate.description, **self.to_dict(), "elsewhere": own.description}
        name = f"{self.candidate.name} {self.direction}"
        return ResolvedAttention(name=name, function=attend, description=description)


@dataclass(frozen=True, slots=True)
class _Cast:
    """An attention in the dtype that the model's own would compute in."""

    attention: MaskedAttention
    dtype: torch.dtype | None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.with_lse(q, k, v)[0]

    def with_lse(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        if self.dtype is not None:
            q, k, v = (x.to(self.dtype) for x in (q, k, v))
        return self.attention.with_lse(q, k, v)


class _Autocast:
    """The model's own attention under the autocast it was called in, also in the backward pass."""

    def __init__(self, primary: Primary, call: AttentionCall) -> None:
        self._primary = primary
        self._dtype = call.dtype

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        enabled = self._dtype is not None
        with torch.autocast(q.device.type, dtype=self._dtype, enabled=enabled):
            return self._primary(q, k, v)


class _Split:
    """An attention whose output comes from one function and its gradients from another."""

    def __init__(self, forward: Primary, backward: Primary) -> None:
        self._forward, self._backward = forward, backward

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return _SplitFunction.apply(q, k, v, self._forward, self._backward)


class _SplitFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, forward: Primary, backward: Primary
    ) -> Tensor:
        ctx.save_for_backward(q, k, v)
        ctx.attend = backward
        return forward(q, k, v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        leaves = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.attend(*leaves)
        return (*torch.autograd.grad(out, leaves, grads[0]), None, None)
