"""Reads flash-attn's `flash_attn_with_kvcache`: queries against keys and values that are kept.

Each sequence sees its part of the cache, which may lie in pages, and the new keys that the call
itself writes behind that. The cache is gathered into tensors of the call's own before the call is
made: what follows may write over it. What no query may see is zero there, whatever lies in the
cache. The function has no backward. Leaves out rotary embeddings inside the call, and caches in
another format.
Source: flash-attn 2.8, `flash_attn_interface.py`; flash-attn 3, `hopper/flash_attn_interface.py`.

Shape suffixes: B batch, T tokens of the cache, G kv heads, D head_dim.
"""

from collections.abc import Callable, Mapping
from inspect import BoundArguments
from typing import Any

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from stability.intercept.flash_attn_calls import scalar_arguments, unread
from stability.intercept.library_call import LibraryCall, left_as_it_is
from stability.intercept.token_places import TokenPlaces
from stability.probe.captured_call import add_bias

__all__ = ["read_with_cache"]

_READ = {
    *("q", "k_cache", "v_cache", "k", "v", "cache_seqlens", "cache_batch_idx", "cache_leftpad"),
    *("block_table", "page_table", "softmax_scale", "causal", "window_size", "softcap"),
    *("alibi_slopes", "rotary_interleaved"),
}


def read_with_cache(function: Callable[..., Any], given: BoundArguments) -> LibraryCall:
    """Read a call of `flash_attn_with_kvcache`."""
    reason = _unsupported(given.arguments)
    if reason:
        return left_as_it_is(function, given, given.arguments["q"], reason)
    of = dict(given.arguments)
    if isinstance(of["cache_seqlens"], Tensor):  # counted on in place before the call is repeated
        of["cache_seqlens"] = of["cache_seqlens"].clone()
    ends, places = _places(of)
    k, v = (_gathered(of, name, ends, places).transpose(1, 2) for name in ("k", "v"))
    q = of["q"].transpose(1, 2)
    mask, valid = _mask(of, q, places)

    def with_out(returned: Any, out: Tensor) -> Any:
        if returned is None:  # another has computed it, and nobody has written the new keys
            _write(of, ends)
        out = out.transpose(1, 2)
        return (out, *returned[1:]) if isinstance(returned, tuple) else out

    return LibraryCall(
        qkv=(q, k, v),
        # on its own cache: gathered keys hold the same
        call=lambda q, k, v: function(**{**of, "q": q.transpose(1, 2)}),
        out_as_ours=lambda returned: (
            returned[0] if isinstance(returned, tuple) else returned
        ).transpose(1, 2),
        with_out=with_out,
        mask=mask,
        valid=valid,
    )


def _unsupported(of: Mapping[str, Any]) -> str:
    reason = unread(of, _READ, "flash_attn_with_kvcache")
    if reason:
        return reason
    q, cache = of["q"], of["k_cache"]
    if q.dim() != 4:
        return f"q of {q.dim()} dimensions beside a cache"
    if cache.dtype != q.dtype:
        return f"a cache in {cache.dtype} beside q in {q.dtype}"
    return ""


def _pages(of: Mapping[str, Any]) -> Tensor | None:
    table = of.get("block_table")
    return of.get("page_table") if table is None else table


def _places(of: Mapping[str, Any]) -> tuple[Tensor, TokenPlaces]:
    """Return where the cache of each sequence ends before the call, and its tokens' places."""
    q, cache, pages = of["q"], of["k_cache"], _pages(of)
    tokens = cache.shape[1] * (1 if pages is None else pages.shape[1])
    ends = of["cache_seqlens"]
    if not isinstance(ends, Tensor):
        ends = torch.full((len(q),), tokens if ends is None else ends, device=q.device)
    at = torch.arange(tokens, device=q.device)
    new = 0 if of["k"] is None else of["k"].shape[1]
    is_real = at < (ends + new)[:, None]
    starts = of.get("cache_leftpad")
    if starts is not None:
        is_real = is_real & (at >= starts[:, None])
    return ends.long(), TokenPlaces.padded(is_real)


def _gathered(of: Mapping[str, Any], name: str, ends: Tensor, places: TokenPlaces) -> Tensor:
    """Return the keys or values of each sequence one after the other, (B, T, G, D)."""
    cache_BTGD, pages = of[f"{name}_cache"], _pages(of)
    if pages is not None:
        # an entry behind a sequence's end may be anything
        known = pages.long().clamp(0, len(cache_BTGD) - 1)
        cache_BTGD = cache_BTGD[known].flatten(1, 2)
    elif of.get("cache_batch_idx") is not None:
        cache_BTGD = cache_BTGD[of["cache_batch_idx"].long()]
    else:
        cache_BTGD = cache_BTGD[: len(ends)]
    # zeros: what nobody has written yet may be NaN, which no mask hides from a product
    found = cache_BTGD.masked_fill(~places.is_real[:, :, None, None], 0.0)
    if of[name] is not None:
        row = torch.arange(len(ends), device=ends.device)[:, None]
        found[row, ends[:, None] + torch.arange(of[name].shape[1], device=ends.device)] = of[name]
    return found


def _write(of: Mapping[str, Any], ends: Tensor) -> None:
    """Write the new keys and values into the cache, as the call would have."""
    for name in ("k", "v") if of["k"] is not None else ():
        cache, pages = of[f"{name}_cache"], _pages(of)
        row = torch.arange(len(ends), device=ends.device)[:, None]
        at = ends[:, None] + torch.arange(of[name].shape[1], device=ends.device)
        if pages is not None:
            page = pages.long()[row, at // cache.shape[1]]
            cache[page, at % cache.shape[1]] = of[name]
            continue
        index = of.get("cache_batch_idx")
        cache[row if index is None else index.long()[:, None], at] = of[name]


def _mask(of: Mapping[str, Any], q: Tensor, keys: TokenPlaces) -> tuple[MaskArguments, Tensor]:
    """Return the mask of all the gathered keys, and which query rows see any."""
    mask = scalar_arguments(of)
    slopes = mask.pop("alibi_slopes", None)
    left, right = mask.pop("window", None) or (None, None)
    right = 0 if mask.get("causal") else right
    mask["causal"] = False
    everything = torch.ones(q.shape[0], q.shape[2], dtype=torch.bool, device=q.device)
    queries = TokenPlaces.padded(everything)
    visible = queries.visible(keys, (left, right))
    mask["attn_mask"] = visible
    if slopes is not None:
        distance = queries.distance(keys, bottom_right=True).abs()
        bias = -slopes.double().reshape(-1, q.shape[1], 1, 1) * distance[:, None]
        mask["attn_mask"] = add_bias(visible, bias)
    return mask, visible.any(-1).squeeze(1)
