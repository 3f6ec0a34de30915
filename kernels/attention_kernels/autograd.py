"""Flash attention as one differentiable operation over an engine: the only place with a ctx.

Saves q, k, v as they came, and out and lse in the work format, rounded as the numerics say: the
backward's delta reads the out that was stored. Leaves out the arithmetic (`twin_*`, `triton_*`)
and choosing the engine (`api`).
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels import twin_backward, twin_forward
from attention_kernels.arithmetic import ieee_arithmetic
from attention_kernels.formats import round_into
from attention_kernels.numerics import FlashNumerics, input_format

__all__ = ["FlashAttention"]


class FlashAttention(torch.autograd.Function):
    """Differentiable once, in q, k and v; lse is not differentiable."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        numerics: FlashNumerics,
        engine: str,
    ) -> tuple[Tensor, Tensor]:
        """Return out in q's dtype and lse in the work format; `numerics` and `engine` resolved."""
        run, _ = _engine(engine)
        with ieee_arithmetic(q.device):
            out, lse = run(q, k, v, causal=causal, scale=scale, numerics=numerics)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.options = {"causal": causal, "scale": scale, "numerics": numerics}
        ctx.engine = engine
        ctx.mark_non_differentiable(lse)
        return round_into(out, input_format(q.dtype), q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients of q, k and v in their dtype, None for those not needed."""
        _, run = _engine(ctx.engine)
        q = ctx.saved_tensors[0]
        with ieee_arithmetic(q.device):
            gradients = run(grads[0], *ctx.saved_tensors, **ctx.options)
        stored = input_format(q.dtype)
        wanted = [
            round_into(gradient, stored, q.dtype) if needed else None
            for gradient, needed in zip(gradients, ctx.needs_input_grad, strict=False)
        ]
        return *wanted, None, None, None, None


def _engine(name: str) -> tuple[Any, Any]:
    if name == "twin":
        return twin_forward.forward, twin_backward.backward
    # Triton is an optional dependency: without it the twin still runs.
    from attention_kernels import triton_launch

    return triton_launch.forward, triton_launch.backward
