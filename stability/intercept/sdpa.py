"""Catches every `scaled_dot_product_attention` of a torch model, in the model's own forward passes.

A `TorchFunctionMode` sees the calls. Forward hooks name the module that makes a call, and switch
the mode on only while the model's forward runs, so that calls elsewhere are never seen.
`nn.MultiheadAttention` calls SDPA inside a function that the mode sees as one, so there the name
itself is replaced for the time of that call. Leaves out what is done with a call (`probe`,
`replacement`). A compiled graph has no calls to catch: `session` refuses such a model.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_kernels import MaskArguments
from stability.probe.captured_call import AttentionCall, CallHandler, autocast_dtype, valid_rows

__all__ = ["catch_sdpa"]

_SDPA = F.scaled_dot_product_attention


@contextmanager
def catch_sdpa(model: nn.Module, handler: CallHandler) -> Iterator[None]:
    """Hand each call that a module of `model` makes to `handler`.

    The layer is the dotted path of the innermost module; a second call of one module in the same
    forward pass gets `#1` behind it, and so on. The model itself is called `model`.
    """
    names = {module: name or "model" for name, module in model.named_modules()}
    tracker = _Tracker(names, handler)
    handles = []
    for module in names:
        handles.append(module.register_forward_pre_hook(tracker.enter))
        handles.append(module.register_forward_hook(tracker.leave, always_call=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        tracker.close()


class _Tracker:
    """Knows which module is running, and keeps the mode on while one is."""

    def __init__(self, names: dict[nn.Module, str], handler: CallHandler) -> None:
        self._names = names
        self._handler = handler
        self._running: list[nn.Module] = []
        self._calls: dict[str, int] = {}
        self._mode: _SdpaMode | None = None

    def enter(self, module: nn.Module, args: Any) -> None:
        if not self._running:
            self._calls.clear()
            self._mode = _SdpaMode(self.caught)
            self._mode.__enter__()
        self._running.append(module)

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._running:
            self._running.pop()
        if not self._running:
            self.close()

    def close(self) -> None:
        self._running.clear()
        if self._mode is not None:
            self._mode.__exit__(None, None, None)
            self._mode = None

    def caught(self, *args: Any, **kwargs: Any) -> Tensor:
        name = self._names[self._running[-1]]
        count = self._calls[name] = self._calls.get(name, -1) + 1
        return _hand_over(f"{name}#{count}" if count else name, self._handler, *args, **kwargs)


class _SdpaMode(TorchFunctionMode):
    """Calls `caught` in the place of SDPA."""

    def __init__(self, caught: Callable[..., Tensor]) -> None:
        super().__init__()
        self._caught = caught

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _SDPA:
            return self._caught(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            with patch.object(F, "scaled_dot_product_attention", self._caught):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _hand_over(
    layer: str,
    handler: CallHandler,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}

    def primary(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return _SDPA(q, k, v, attn_mask, enable_gqa=enable_gqa, **options), None

    if query.dim() not in (3, 4):
        unsupported = f"q of {query.dim()} dimensions"
        call = AttentionCall(layer=layer, q=query, k=key, v=value, unsupported=unsupported)
        return handler(call, primary)
    no_heads = query.dim() == 3
    if no_heads and attn_mask is not None and attn_mask.dim() == 3:
        seen = attn_mask.detach().unsqueeze(1)
    else:
        seen = None if attn_mask is None else attn_mask.detach()
    q, k, v = (x.unsqueeze(1) if no_heads else x for x in (query, key, value))
    call = AttentionCall(
        layer=layer,
        q=q,
        k=k,
        v=v,
        mask=_mask(q, k, seen, is_causal, scale),
        valid=valid_rows(seen, q, k),
        dtype=autocast_dtype(q, k, v),
        unsupported=_unsupported(q, v, dropout_p),
    )
    if not no_heads:
        return handler(call, primary)

    def primary_with_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, None]:
        return primary(*(x.squeeze(1) for x in (q, k, v)))[0].unsqueeze(1), None

    return handler(call, primary_with_heads).squeeze(1)


def _mask(
    q: Tensor, k: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None
) -> MaskArguments:
    """Return SDPA's mask as ours: its `is_causal` is aligned top-left, ours bottom-right."""
    same_place = q.shape[2] == k.shape[2]
    mask = MaskArguments(causal=is_causal and same_place)
    if scale is not None:
        mask["scale"] = scale
    if is_causal and not same_place:
        shape = (q.shape[2], k.shape[2])
        attn_mask = torch.ones(shape, dtype=torch.bool, device=q.device).tril()
    if attn_mask is not None:
        mask["attn_mask"] = attn_mask
    return mask


def _unsupported(q: Tensor, v: Tensor, dropout_p: float) -> str:
    if dropout_p > 0:
        return f"dropout_p {dropout_p:g}; a shadow would drop other values"
    if v.shape[-1] != q.shape[-1]:
        return f"v of head_dim {v.shape[-1]}, q of {q.shape[-1]}"
    return ""
