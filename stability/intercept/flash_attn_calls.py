"""Reads the calls of flash-attn's functions: heads behind tokens, packed or not, padded or not.

Leaves out how they are caught (`library_functions`).
Source: flash-attn 2.8, `flash_attn_interface.py`.
"""

from collections.abc import Callable, Mapping, Set
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from stability.intercept.library_call import LibraryCall, Reader
from stability.intercept.token_places import TokenPlaces
from stability.probe.captured_call import valid_rows

__all__ = ["FLASH_ATTN", "scalar_arguments", "unread"]

_MORE = ("return_attn_probs", "return_softmax_lse")


def _read(function: Callable[..., Any], given: BoundArguments) -> LibraryCall:
    """Read a call on q, k and v that are all there."""
    of = given.arguments
    names = [name for name in ("qkv", "q", "kv", "k", "v") if name in of]
    parts = {"qkv": 3, "q": 1, "kv": 2, "k": 1, "v": 1}
    tensors: list[Tensor] = []
    for name in names:
        # (..., parts, heads, head_dim)
        tensors += of[name].unbind(-3) if parts[name] > 1 else [of[name]]
    is_packed = tensors[0].dim() == 3

    def ours(x: Tensor) -> Tensor:
        return (x.unsqueeze(0) if is_packed else x).transpose(1, 2)

    def theirs(x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return x.squeeze(0) if is_packed else x

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        left = [theirs(x) for x in (q, k, v)]
        values = dict(of)
        for name in names:
            taken, left = left[: parts[name]], left[parts[name] :]
            values[name] = torch.stack(taken, -3) if len(taken) > 1 else taken[0]
        return function(**values)

    def with_out(returned: Any, out: Tensor) -> Any:
        ours_back = theirs(out)
        return (ours_back, *returned[1:]) if isinstance(returned, tuple) else ours_back

    q, k, v = (ours(x) for x in tensors)
    mask = _mask(of, q, k)
    attn_mask = mask.get("attn_mask")
    return LibraryCall(
        qkv=(q, k, v),
        mask=mask,
        valid=None if attn_mask is None else valid_rows(attn_mask, q, k),
        unsupported=_unsupported(of),
        asks_more=next((f"{name} of flash-attn" for name in _MORE if of.get(name)), ""),
        call=call,
        out_as_ours=lambda returned: ours(returned[0] if isinstance(returned, tuple) else returned),
        with_out=with_out,
    )


def _mask(of: dict[str, Any], q: Tensor, k: Tensor) -> MaskArguments:
    mask = scalar_arguments(of)
    starts = of.get("cu_seqlens", of.get("cu_seqlens_q"))
    if starts is None:
        return mask
    of_keys = of.get("cu_seqlens_k", starts)
    queries = TokenPlaces.packed(starts[:-1], starts.diff(), q.shape[2])
    keys = TokenPlaces.packed(of_keys[:-1], of_keys.diff(), k.shape[2])
    return _by_tensor(mask, queries, keys)


def scalar_arguments(of: Mapping[str, Any]) -> MaskArguments:
    """Return what a call says of its mask by numbers, and its ALiBi slopes."""
    mask = MaskArguments(causal=bool(of.get("causal")))
    if of.get("softmax_scale") is not None:
        mask["scale"] = float(of["softmax_scale"])
    window = tuple(of.get("window_size") or (-1, -1))
    if window != (-1, -1):
        left, right = (None if side is None or side < 0 else side for side in window)
        mask["window"] = (left, right)
    if of.get("softcap"):
        mask["softcap"] = float(of["softcap"])
    if of.get("alibi_slopes") is not None:
        mask["alibi_slopes"] = of["alibi_slopes"].detach()
    return mask


def _by_tensor(mask: MaskArguments, queries: TokenPlaces, keys: TokenPlaces) -> MaskArguments:
    """Return the mask as one of all tokens: none sees another sequence, or padding.

    The last query stands at the last key, as flash-attn has it.
    """
    left, right = mask.pop("window", None) or (None, None)
    if mask.get("causal"):
        right = 0 if right is None else min(right, 0)
    mask["causal"] = False
    mask["attn_mask"] = queries.visible(keys, (left, right))
    return mask


_READ = {
    *("qkv", "q", "kv", "k", "v", "softmax_scale", "causal", "window_size", "softcap"),
    *("cu_seqlens", "cu_seqlens_q", "cu_seqlens_k", "alibi_slopes", "dropout_p"),
}
CHANGES_NOTHING = {
    *("max_seqlen", "max_seqlen_q", "max_seqlen_k", "deterministic", "return_attn_probs"),
    *("return_softmax_lse", "num_splits", "pack_gqa", "sm_margin", "scheduler_metadata"),
}
"""Arguments that say how to compute or what to return beside out."""


def unread(of: Mapping[str, Any], known: Set[str], function: str) -> str:
    """Name an argument that is given and not known, e.g. of a newer version; "" if none is."""
    for name in sorted(of.keys() - known - CHANGES_NOTHING):
        if isinstance(of[name], Tensor) or of[name]:
            return f"the argument {name} of {function}"
    return ""


def _unsupported(of: dict[str, Any]) -> str:
    if of.get("dropout_p"):
        return f"dropout_p {of['dropout_p']:g}; a shadow would drop other values"
    if of.get("block_table") is not None:
        return "a paged cache (block_table)"
    if of.get("alibi_slopes") is not None and any("cu_seqlens" in name for name in of):
        return "ALiBi slopes of packed sequences"
    return unread(of, _READ, "flash-attn")


FLASH_ATTN: dict[str, Reader] = dict.fromkeys(
    (
        "flash_attn_func",
        "flash_attn_qkvpacked_func",
        "flash_attn_kvpacked_func",
        "flash_attn_varlen_func",
        "flash_attn_varlen_qkvpacked_func",
        "flash_attn_varlen_kvpacked_func",
    ),
    _read,
)
"""How the calls of each function are read, by its name."""
