"""A planted attention as one operator of torch, which a compiled graph holds as it is.

A fault is made by autograd functions that hand a call on from forward to backward, which
torch.compile can't trace. So in a graph the attention with its fault is an opaque operator; its
backward attends again, as it does outside of a graph, and differentiates that. What it computes is
what the planted attention computes eagerly, bit for bit if that gives the same bits twice.

An operator takes tensors, numbers and strings only: the function travels as a handle, and whoever
calls holds it.
"""

import functools
import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["compilable"]

Attention = Callable[..., Any]

_handles = itertools.count()
_planted: weakref.WeakValueDictionary[int, Attention] = weakref.WeakValueDictionary()
"""Planted attentions, whose `__wrapped__` is the one without the fault, by handle."""


def compilable(planted: Attention, attention: Attention) -> Attention:
    """Return `planted`, which is `attention` with a fault, so that torch.compile takes it.

    Inside of torch.compile it takes causal and scale alone: ValueError for other options.
    """
    handle = next(_handles)

    @functools.wraps(attention)
    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if not torch.compiler.is_compiling():
            return planted(q, k, v, **options)
        causal, scale = options.pop("causal", False), options.pop("scale", None)
        if options:
            raise ValueError(
                "plant: inside of torch.compile a planted attention must be given causal and scale "
                f"alone, got {', '.join(options)}; compile what does not call it"
            )
        return planted_forward(q, k, v, causal, scale, handle)

    _planted[handle] = attend
    return attend


_CALL = "Tensor q, Tensor k, Tensor v, bool causal, float? scale, int handle"


@torch.library.custom_op(
    "attention_kernels::planted_forward", mutates_args=(), schema=f"({_CALL}) -> Tensor"
)
def planted_forward(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, handle: int
) -> Tensor:
    """Return out of the planted attention, contiguous."""
    return _planted[handle](q, k, v, causal=causal, scale=scale).contiguous()


@planted_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, handle: int) -> Tensor:
    right: Any = _planted[handle]
    out = right.__wrapped__(q, k, v, causal=causal, scale=scale)
    return torch.empty_like(out, memory_format=torch.contiguous_format)


@torch.library.custom_op(
    "attention_kernels::planted_backward",
    mutates_args=(),
    schema=f"(Tensor dout, {_CALL}) -> (Tensor dq, Tensor dk, Tensor dv)",
)
def planted_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    handle: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Attend again and differentiate."""
    # The current stream belongs to a thread, and the work is handed to another one below.
    stream = torch.cuda.current_stream(q.device) if q.is_cuda else None

    def differentiate() -> tuple[Tensor, ...]:
        with torch.cuda.stream(stream):
            leaves = [x.detach().requires_grad_() for x in (q, k, v)]
            return torch.autograd.grad(
                _planted[handle](*leaves, causal=causal, scale=scale), leaves, dout
            )

    # torch switches autograd off in the thread that runs an operator, so another differentiates.
    with ThreadPoolExecutor(max_workers=1) as thread:
        dq, dk, dv = (x.contiguous() for x in thread.submit(differentiate).result())
    return dq, dk, dv


@planted_backward.register_fake
def _(dout: Tensor, *qkv_and_call: Any) -> tuple[Tensor, ...]:
    q, k, v, *_ = qkv_and_call
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    q, k, v, *ctx.call = inputs
    ctx.save_for_backward(q, k, v)


def _gradients(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
    return (*planted_backward(dout, *ctx.saved_tensors, *ctx.call), None, None, None)


planted_forward.register_autograd(_gradients, setup_context=_save)
