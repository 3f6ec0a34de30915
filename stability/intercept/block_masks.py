"""Reads FlexAttention's `BlockMask`: which query may attend which key, by its `mask_mod`.

The function is evaluated anew at each call, as flex_attention does, since the tensors it reads may
have changed. Up to `WHOLE` truth values it becomes a tensor, which the layers share; a larger one
is never held: the function itself is handed on, and evaluated in blocks (`attention_kernels`).

A `BlockMask` says the same twice: by its function, and by tables of the blocks that it leaves out
or sees whole. flex_attention reads the function alone, its compiled form both: where they differ
the two compute different attentions, and neither can be called right.
Source: torch 2.13, `nn/attention/flex_attention.py`.

Shape suffixes: B batch or 1, H heads or 1, I some rows, J some keys, M query blocks, N key blocks.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from attention_kernels.mask_mod import MaskMod

__all__ = ["ReadBlockMask", "read_block_mask"]

WHOLE = 2**26
"""The largest mask that is held as a tensor, in truth values: 64 MiB, once for all layers."""
TILE = 2**22
"""About how many truth values are evaluated at a time."""


class ReadBlockMask(NamedTuple):
    """What a `BlockMask` lets be attended."""

    mask: MaskArguments
    """It holds `attn_mask`, bool (B, H, query_len, key_len), or where too large `mask_mod`."""
    attending: Tensor
    """bool (batch, query_len): true for a query that attends some key, in some head."""
    attended: Tensor
    """bool (batch, key_len): true for a key that some query attends, in some head."""
    unsupported: str = ""

    def rows_that_count(self, self_attention: bool) -> Tensor:
        """Return, bool (batch, query_len), which queries attend and, as keys, are attended."""
        if self_attention and self.attending.shape == self.attended.shape:
            return self.attending & self.attended
        return self.attending


_LAST: WeakKeyDictionary[Any, ReadBlockMask] = WeakKeyDictionary()
"""What was last read of a mask: the layers of a model share it, and so the tensor made of it."""


def read_block_mask(block_mask: Any, q: Tensor, k: Tensor) -> ReadBlockMask:
    """Read the mask of a call on `q` and `k`, (batch, heads, length, head_dim).

    It is `unsupported` where the tables of `block_mask` contradict its function.
    """
    last = _LAST.get(block_mask)
    with torch.no_grad():
        read = _read(block_mask, q, k)
        old, new = (x.mask.get("attn_mask") if x is not None else None for x in (last, read))
        if last is not None and old is not None and new is not None and _equal(old, new):
            read = read._replace(mask=last.mask)
    _LAST[block_mask] = read
    return read


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and torch.equal(a, b)


def _read(block_mask: Any, q: Tensor, k: Tensor) -> ReadBlockMask:
    batch, heads, query_len, key_len = *q.shape[:3], k.shape[2]
    function = _OfBroadcastIndices(block_mask.mask_mod, q.device)
    sizes = [len_ if on else 1 for len_, on in zip((batch, heads), function.depends, strict=False)]
    mod = MaskMod(function, *map(range, sizes), where="flex_attention")
    tables = _Tables(block_mask, query_len, key_len)
    attending = torch.zeros(sizes[0], query_len, dtype=torch.bool, device=q.device)
    attended = torch.zeros(sizes[0], key_len, dtype=torch.bool, device=q.device)
    contradicted = torch.zeros((), dtype=torch.bool, device=q.device)
    whole = None
    if sizes[0] * sizes[1] * query_len * key_len <= WHOLE:
        whole = torch.empty(*sizes, query_len, key_len, dtype=torch.bool, device=q.device)
    for rows, keys in tables.tiles(sizes[0] * sizes[1]):
        seen_BHIJ = mod.visible(rows, keys, q.device).expand(*sizes, len(rows), len(keys))
        of_rows, of_keys = slice(rows.start, rows.stop), slice(keys.start, keys.stop)
        attending[:, of_rows] |= seen_BHIJ.any(3).any(1)
        attended[:, of_keys] |= seen_BHIJ.any(2).any(1)
        contradicted |= tables.contradict(seen_BHIJ, rows, keys)
        if whole is not None:
            whole[:, :, of_rows, of_keys] = seen_BHIJ
    return ReadBlockMask(
        MaskArguments(mask_mod=function) if whole is None else MaskArguments(attn_mask=whole),
        attending.expand(batch, -1),
        attended.expand(batch, -1),
        _CONTRADICTED if contradicted else "",
    )


_CONTRADICTED = (
    "a BlockMask whose blocks contradict its mask_mod: flex_attention goes by mask_mod alone, "
    "compiled it goes by both; make the mask by create_block_mask, with as many batches and heads "
    "as mask_mod tells apart"
)


class _OfBroadcastIndices:
    """FlexAttention's mask_mod, which takes four numbers, for index tensors that broadcast.

    It returns an axis of 1 where the result does not depend on the index.
    """

    def __init__(self, mask_mod: Callable[..., Tensor], device: torch.device) -> None:
        self._mask_mod = mask_mod
        self.depends = _dependence(mask_mod, device)

    def __call__(self, *indices: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_mask  # heavy, and imported by now

        lines = [
            index.flatten() if on else index.flatten()[:1]
            for index, on in zip(indices, self.depends, strict=True)
        ]

        def of_places(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            places = (batch, head, query, key)
            return self._mask_mod(*(line[at] for line, at in zip(lines, places, strict=True)))

        return create_mask(of_places, *map(len, lines), device=indices[0].device)


def _dependence(mask_mod: Callable[..., Tensor], device: torch.device) -> tuple[bool, ...]:
    """Return of which of (batch, head, query, key) the result is a function, if of no values."""
    from torch.nn.attention.flex_attention import create_mask

    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    found: list[bool] = []

    def asked(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        result = rest = mask_mod(batch, head, query, key)
        levels = set()
        while functorch.is_batchedtensor(rest):  # vmap wraps a tensor once for each of its axes
            levels.add(functorch.maybe_get_level(rest))
            rest = functorch.get_unwrapped(rest)
        found[:] = [functorch.maybe_get_level(x) in levels for x in (batch, head, query, key)]
        return result

    create_mask(asked, 1, 1, 1, 1, device=device)
    return tuple(found)


class _Tables:
    """What the tables of a `BlockMask` say of each block."""

    def __init__(self, block_mask: Any, query_len: int, key_len: int) -> None:
        lengths = (query_len, key_len)
        self._lengths = lengths
        self._block = [
            min(size, length) for size, length in zip(block_mask.BLOCK_SIZE, lengths, strict=True)
        ]
        blocks = -(-key_len // self._block[1])
        self._some_BHMN = self._all_BHMN = None
        partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, blocks)
        if partial.shape[2] * self._block[0] < query_len:
            return  # made for fewer queries, which flex_attention refuses
        self._all_BHMN = torch.zeros_like(partial)
        if block_mask.full_kv_num_blocks is not None:
            self._all_BHMN = _listed(
                block_mask.full_kv_num_blocks, block_mask.full_kv_indices, blocks
            )
        self._some_BHMN = partial | self._all_BHMN

    def tiles(self, of_each: int) -> Iterator[tuple[range, range]]:
        """Yield tiles of whole blocks, each of about `TILE` truth values, `of_each` for a place."""
        (query_len, key_len), (block_q, block_k) = self._lengths, self._block
        width = max(1, min(key_len, TILE // (of_each * block_q)) // block_k) * block_k
        height = max(1, TILE // (of_each * min(width, key_len)) // block_q) * block_q
        for row in range(0, query_len, height):
            for key in range(0, key_len, width):
                yield (
                    range(row, min(row + height, query_len)),
                    range(key, min(key + width, key_len)),
                )

    def contradict(self, seen_BHIJ: Tensor, rows: range, keys: range) -> Tensor:
        """Return, as a bool scalar, whether a tile is said to be seen other than it is."""
        if self._some_BHMN is None or self._all_BHMN is None:
            return seen_BHIJ.new_zeros(())
        (block_q, block_k), device = self._block, seen_BHIJ.device
        down, across = -(-len(rows) // block_q), -(-len(keys) // block_k)
        padding = (0, across * block_k - len(keys), 0, down * block_q - len(rows))
        some, all_ = (
            torch.nn.functional.pad(seen_BHIJ, padding, value=value)
            .unflatten(3, (across, block_k))
            .unflatten(2, (down, block_q))
            .transpose(3, 4)
            .flatten(4)
            for value in (False, True)
        )
        m, n = rows.start // block_q, keys.start // block_k
        of_tile = (slice(None), slice(None), slice(m, m + down), slice(n, n + across))
        told_some, told_all = (x[of_tile].to(device) for x in (self._some_BHMN, self._all_BHMN))
        return ((some.any(-1) & ~told_some) | (told_all & ~all_.all(-1))).any()


def _listed(counts: Tensor, indices: Tensor, blocks: int) -> Tensor:
    """Return bool (B, H, M, N), true for the key blocks that the first entries of a row name."""
    counts = counts.view((1,) * (3 - counts.dim()) + tuple(counts.shape))
    indices = indices.view((1,) * (4 - indices.dim()) + tuple(indices.shape))
    used = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    listed = used.new_zeros(*counts.shape, blocks + 1)
    listed.scatter_(-1, torch.where(used, indices, blocks).clamp(max=blocks).long(), True)
    return listed[..., :blocks]
