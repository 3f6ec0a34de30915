"""Catches the calls of `scaled_dot_product_attention`, by whatever name it was imported.

A `TorchFunctionMode` sees them, in the thread that runs the model and only while it runs.
`nn.MultiheadAttention` calls SDPA inside a function that the mode sees as one, so there the name
itself is replaced for the time of that call. Leaves out whose a call is (`catcher`) and what is
done with it (`probe`, `replacement`). A compiled graph has no calls to catch: they
are observed (`compiled_taps`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_kernels import MaskArguments
from stability.intercept.catcher import Catcher
from stability.probe.autocast import autocast_dtype, lowered_dtype
from stability.probe.captured_call import AttentionCall, in_dtype_of_q, valid_rows

__all__ = ["catch_sdpa"]

_SDPA: Any = vars(torch._C)["_nn"].scaled_dot_product_attention
"""What `torch.nn.functional` calls so, whatever somebody has put in its place there by now."""
_NAMES = (
    _SDPA,
    # as a module that torch.export has made calls it
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
)


@contextmanager
def catch_sdpa(catcher: Catcher) -> Iterator[None]:
    """Inside, each call that a module of the model makes goes to `catcher`."""

    def caught(function: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
        if not catcher.may_catch:
            return function(*args, **kwargs)
        return _hand_over(catcher, function, *args, **kwargs)

    catcher.modes.append(lambda: _SdpaMode(caught))
    yield


class _SdpaMode(TorchFunctionMode):
    """Calls `caught` in the place of SDPA, with the function that was called."""

    def __init__(self, caught: Callable[..., Tensor]) -> None:
        super().__init__()
        self._caught = caught

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.compiler.is_dynamo_compiling():  # a graph is to be what it is without this
            return func(*args, **(kwargs or {}))
        if any(func is name for name in _NAMES):
            return self._caught(_SDPA, *args, **(kwargs or {}))
        if getattr(func, "__wrapped__", None) is _SDPA:  # another one, that was put in its place
            return self._caught(func, *args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            caught = partial(self._caught, F.scaled_dot_product_attention)
            with patch.object(F, "scaled_dot_product_attention", caught):
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _hand_over(
    catcher: Catcher,
    function: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    layer = catcher.next_layer()
    options = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}

    def primary(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = attn_mask
    ) -> tuple[Tensor, None]:
        mask = in_dtype_of_q(bias, query, q)
        return function(q, k, v, mask, enable_gqa=enable_gqa, **options), None

    if query.dim() not in (3, 4):
        unsupported = f"q of {query.dim()} dimensions"
        call = AttentionCall(layer=layer, q=query, k=key, v=value, unsupported=unsupported)
        return catcher.hand_over(call, primary)
    no_heads = query.dim() == 3
    of_batch = no_heads and attn_mask is not None and attn_mask.dim() == 3
    seen = attn_mask.unsqueeze(1) if of_batch and attn_mask is not None else attn_mask
    trained = {} if seen is None or not seen.requires_grad else {"bias": seen}
    q, k, v = (x.unsqueeze(1) if no_heads else x for x in (query, key, value))
    call = AttentionCall(
        layer=layer,
        q=q,
        k=k,
        v=v,
        mask=_mask(q, k, seen, is_causal, scale),
        valid=valid_rows(None if seen is None else seen.detach(), q, k),
        dtype=autocast_dtype(q, k, v),
        lowered_to=lowered_dtype(q),
        unsupported=_unsupported(dropout_p),
        trained=trained,
    )
    if not no_heads:
        return catcher.hand_over(call, primary)

    def primary_with_heads(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, None]:
        given = {} if bias is None else {"bias": bias.squeeze(1) if of_batch else bias}
        return primary(*(x.squeeze(1) for x in (q, k, v)), **given)[0].unsqueeze(1), None

    return catcher.hand_over(call, primary_with_heads).squeeze(1)


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


def _unsupported(dropout_p: float) -> str:
    return f"dropout_p {dropout_p:g}; a shadow would drop other values" if dropout_p else ""
