"""Reads the calls of torch's flex_attention, whose mask is evaluated.

Leaves out how they are caught (`library_functions`).
Source: torch 2.13, `nn/attention/flex_attention.py`.
"""

from collections.abc import Callable
from inspect import BoundArguments
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from stability.intercept.library_call import LibraryCall
from stability.probe.captured_call import valid_rows

__all__ = ["block_mask_as_tensor", "read_flex"]


def read_flex(function: Callable[..., Any], given: BoundArguments) -> LibraryCall:
    """Read a call of flex_attention, whose mask is evaluated."""
    of = given.arguments
    q, k, v = of["query"], of["key"], of["value"]
    mask = MaskArguments(causal=False)
    if of["scale"] is not None:
        mask["scale"] = float(of["scale"])
    if of["block_mask"] is not None:
        mask["attn_mask"] = block_mask_as_tensor(of["block_mask"], q, k)
    attn_mask = mask.get("attn_mask")
    unsupported = ""
    if of["score_mod"] is not None:
        name = getattr(of["score_mod"], "__name__", "score_mod")
        unsupported = f"the score_mod {name} of flex_attention: no candidate computes it"

    def with_out(returned: Any, out: Tensor) -> Any:
        return (out, *returned[1:]) if isinstance(returned, tuple) else out

    return LibraryCall(
        qkv=(q, k, v),
        mask=mask,
        valid=None if attn_mask is None else valid_rows(attn_mask, q, k),
        unsupported=unsupported,
        call=lambda q, k, v: function(**{**of, "query": q, "key": k, "value": v}),
        out_as_ours=lambda returned: returned[0] if isinstance(returned, tuple) else returned,
        with_out=with_out,
    )


_MASKS: WeakKeyDictionary[Any, Tensor] = WeakKeyDictionary()
"""The layers of a model share their block mask, so each is evaluated once."""


def block_mask_as_tensor(block_mask: Any, q: Tensor, k: Tensor) -> Tensor:
    """Return flex_attention's mask as bool `(batch or 1, heads or 1, query_len, key_len)`."""
    from torch.nn.attention.flex_attention import create_mask  # heavy, and imported by now

    shape = (*block_mask.shape[:2], q.shape[2], k.shape[2])
    found = _MASKS.get(block_mask)
    if found is None or tuple(found.shape) != shape:
        with torch.no_grad():
            batch, heads, query_len, key_len = shape
            found = create_mask(
                block_mask.mask_mod, batch, heads, query_len, key_len, device=q.device
            )
        _MASKS[block_mask] = found
    return found
