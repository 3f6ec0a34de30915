"""Looks at a model whose attention somebody has replaced: its own is bound as the baseline."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from stability.intercept.doors import catch_attention
from stability.probe.attention_probe import BindShadow
from stability.probe.captured_call import (
    AttentionCall,
    BoundAttention,
    CallHandler,
    Interceptor,
)

__all__ = ["catching_as"]


def catching_as(baseline: BindShadow | None) -> Interceptor:
    """Return `catch_attention`, in which `baseline` stands for what the model computes with."""
    if baseline is None:
        return catch_attention

    @contextmanager
    def catch(model: nn.Module, handler: CallHandler, *args: Any) -> Iterator[None]:
        def handle(call: AttentionCall, primary: BoundAttention) -> Tensor:
            return handler(call, baseline(call, primary))

        with catch_attention(model, handle, *args):
            yield

    return catch
