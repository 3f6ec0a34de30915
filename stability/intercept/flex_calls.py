"""Reads the calls of torch's flex_attention, whose mask is evaluated.

Leaves out how they are caught (`library_functions`).
Source: torch 2.13, `nn/attention/flex_attention.py`.
"""

from collections.abc import Callable
from inspect import BoundArguments
from typing import Any

from torch import Tensor

from attention_kernels import MaskArguments
from stability.intercept.block_masks import read_block_mask
from stability.intercept.library_call import LibraryCall
from stability.probe.autocast import autocast_dtype

__all__ = ["read_flex"]

_MORE = ("return_lse", "return_aux")


def read_flex(function: Callable[..., Any], given: BoundArguments) -> LibraryCall:
    """Read a call of flex_attention, whose mask is evaluated."""
    of = given.arguments
    q, k, v = of["query"], of["key"], of["value"]
    mask = MaskArguments(causal=False)
    if of["scale"] is not None:
        mask["scale"] = float(of["scale"])
    valid, unsupported = None, ""
    if of["block_mask"] is not None:
        read = read_block_mask(of["block_mask"], q, k)
        mask.update(read.mask)
        # with other numbers of queries and keys, key i is not query i's own token
        valid = read.attended if q.shape[2] == k.shape[2] else None
        unsupported = read.unsupported
    if k.shape[0] != q.shape[0]:
        unsupported = f"keys of batch {k.shape[0]} for queries of batch {q.shape[0]}: expand them"
    if autocast_dtype(q, k, v) is None and not q.dtype == k.dtype == v.dtype:
        unsupported = f"q of {q.dtype} with k of {k.dtype} and v of {v.dtype}: convert them"
    if of["score_mod"] is not None:
        name = getattr(of["score_mod"], "__name__", "score_mod")
        unsupported = f"the score_mod {name} of flex_attention: no candidate computes it"

    def with_out(returned: Any, out: Tensor) -> Any:
        return (out, *returned[1:]) if isinstance(returned, tuple) else out

    return LibraryCall(
        qkv=(q, k, v),
        mask=mask,
        valid=valid,
        unsupported=unsupported,
        asks_more=next((f"{name} of flex_attention" for name in _MORE if of.get(name)), ""),
        call=lambda q, k, v: function(**{**of, "query": q, "key": k, "value": v}),
        out_as_ours=lambda returned: returned[0] if isinstance(returned, tuple) else returned,
        with_out=with_out,
        lse_of=_lse_of,
    )


def _lse_of(returned: Any) -> Tensor | None:
    if not isinstance(returned, tuple):
        return None
    return returned[1] if isinstance(returned[1], Tensor) else returned[1].lse
