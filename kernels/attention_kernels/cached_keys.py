"""Attention of new queries to keys and values that are kept in a cache, whole or in pages.

For evaluation: as in flash-attn's `flash_attn_with_kvcache`, each sequence sees as much of its
cache as is written, its last query standing at the last key. What is seen is first gathered, page
by page, into packed sequences, which the attention then takes as any others; so each engine and
each numerics computes what it would on keys that lie side by side, to the bit, at the price of a
copy. Pages and tokens that no sequence has are never read. Leaves out writing new keys.

Shape suffixes: B batch, H query heads, G kv heads, Q query_len, L tokens of a page or of the cache,
D head_dim, T packed tokens.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attention_kernels.api import AttentionOutput
from attention_kernels.checks import require

__all__ = ["attention_with_kvcache"]

_WHERE = "attention_with_kvcache"


def attention_with_kvcache(
    attend: Callable[..., Any],
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *,
    cache_seqlens: Tensor,
    block_table: Tensor | None = None,
    **options: Any,
) -> Tensor | AttentionOutput:
    """Return what `attend` gives for queries and the written part of a cache.

    `attend` is `flash_attention`, `baseline_attention`, `golden_attention`, or a function that
    takes packed sequences as they do. q is `(batch, heads, query_len, head_dim)`, `cache_seqlens`,
    integers `(batch,)`, says how many tokens of each sequence are written, those of the queries
    included. The caches are `(batch, kv_heads, cache_len, head_dim)`; with `block_table`, integers
    `(batch, pages of a sequence)`, they are `(pages, kv_heads, page_len, head_dim)`, and row b of
    the table names the pages of sequence b in their order, several sequences perhaps the same ones.
    What stands in the table behind a sequence's last page may be anything.

    `options` are those of `attend`: numerics, engine, return_lse, and its mask but for key_padding
    and attn_mask, which packed sequences do not have. Returns out `(batch, heads, query_len,
    head_dim of v)`, with `return_lse` also the LSE `(batch, heads, query_len)`; a sequence without
    a key gives 0. The lengths are read by the host. ValueError where a gradient is wanted, and for
    anything that does not fit.
    """
    _check(q, k_cache, v_cache, cache_seqlens, block_table)
    lengths = cache_seqlens.tolist()
    _check_lengths(lengths, k_cache, block_table)
    batch, _, query_len, _ = q.shape
    k, v = (_gathered(x, lengths, block_table) for x in (k_cache, v_cache))
    ends = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    starts = torch.arange(0, batch * query_len + 1, query_len, dtype=torch.int32)
    result = attend(
        q.transpose(1, 2).flatten(0, 1),
        k,
        v,
        cu_seqlens_q=starts.to(q.device),
        cu_seqlens_k=ends.to(q.device),
        **options,
    )
    if not isinstance(result, tuple):
        return _unpacked(result, batch)
    lse_BHQ = result[1].unflatten(1, (batch, -1)).transpose(0, 1)
    return AttentionOutput(_unpacked(result[0], batch), lse_BHQ)


def _unpacked(out_THD: Tensor, batch: int) -> Tensor:
    return out_THD.unflatten(0, (batch, -1)).transpose(1, 2)


def _gathered(cache: Tensor, lengths: list[int], block_table: Tensor | None) -> Tensor:
    """Return the written tokens of all sequences, one after the other, (T, G, D)."""
    parts = []
    for index, length in enumerate(lengths):
        if block_table is None:
            tokens_LGD = cache[index].transpose(0, 1)
        else:
            pages = block_table[index, : _pages(length, cache)]
            tokens_LGD = cache[pages.long()].transpose(1, 2).flatten(0, 1)
        parts.append(tokens_LGD[:length])
    return torch.cat(parts)


def _pages(length: int, cache: Tensor) -> int:
    return -(-length // cache.shape[2])


def _check(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor, block_table: Tensor | None
) -> None:
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            not (x.requires_grad and torch.is_grad_enabled()),
            f"{_WHERE}: {name}",
            "without a gradient",
            "one that requires it",
            "a cache is for evaluation: call it under torch.no_grad()",
        )
        require(x.dim() == 4, f"{_WHERE}: {name}", "of rank 4", tuple(x.shape), "see its docstring")
    batch = q.shape[0]
    require(
        k_cache.shape[:3] == v_cache.shape[:3],
        f"{_WHERE}: v_cache",
        f"shaped as k_cache {tuple(k_cache.shape)} but for head_dim",
        tuple(v_cache.shape),
        "keep keys and values side by side",
    )
    for name, x, dim in (("cache_seqlens", cache_seqlens, 1), ("block_table", block_table, 2)):
        if x is None:
            continue
        is_integer = not (x.is_floating_point() or x.dtype == torch.bool)
        require(
            is_integer and x.dim() == dim and len(x) == batch,
            f"{_WHERE}: {name}",
            f"integers of rank {dim}, a row for each of the {batch} sequences",
            f"{x.dtype} {tuple(x.shape)}",
            "give one row a sequence of q",
        )
    require(
        block_table is not None or len(k_cache) == batch,
        f"{_WHERE}: k_cache",
        f"one row for each of the {batch} sequences",
        tuple(k_cache.shape),
        "give a block_table if it holds pages",
    )


def _check_lengths(lengths: list[int], k_cache: Tensor, block_table: Tensor | None) -> None:
    pages, page_len = k_cache.shape[0], k_cache.shape[2]
    most = page_len if block_table is None else page_len * block_table.shape[1]
    require(
        all(0 <= length <= most for length in lengths) and any(lengths),
        f"{_WHERE}: cache_seqlens",
        f"from 0 to the {most} tokens of a sequence's cache, and not all 0",
        lengths,
        "count what is written, the queries' own tokens included",
    )
    if block_table is None:
        return
    for length, row in zip(lengths, block_table.tolist(), strict=True):
        used = row[: _pages(length, k_cache)]
        require(
            all(0 <= page < pages for page in used),
            f"{_WHERE}: block_table",
            f"pages from 0 to {pages - 1} up to a sequence's last token",
            used,
            "name the pages in the order of their tokens",
        )
