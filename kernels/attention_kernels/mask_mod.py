"""Evaluates a mask that is a function of positions, as FlexAttention's `mask_mod`, in blocks.

A mask of (query_len, key_len) truth values grows with the square of length. A function of (batch,
head, query, key) does not: each engine evaluates it for the tile at hand, and the Triton kernel,
which cannot call it, reads a table of tiles, of which only those that are seen in part are stored.

The function is evaluated again in the backward, so it must give the same both times. Leaves out
which other masks hide what it shows (`masks`).

Shape suffixes: B batch, H query heads, I some query rows, J some keys, M query blocks, N key
blocks, P tiles seen in part.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

__all__ = ["EMPTY", "FULL", "BlockTable", "MaskFunction", "MaskMod", "block_table", "held"]

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""(batch, head, query, key), int64 tensors that broadcast: bool, true where it may be attended."""

FULL, EMPTY = -1, -2
"""What a table holds for a tile that is seen whole, or not at all; else the index of the tile."""
STRIP = 2**22
"""How many truth values of a table are evaluated at a time: 4 MiB, and 32 MiB of int64 within."""

_handles = itertools.count(1)


class MaskMod:
    """A mask function with the batch and query heads that it is asked about."""

    __slots__ = ("__weakref__", "batch", "function", "handle", "heads", "where")

    def __init__(
        self, function: MaskFunction, batch: range, heads: range, where: str = "attention"
    ) -> None:
        self.function, self.batch, self.heads, self.where = function, batch, heads, where
        self.handle = next(_handles)
        _HELD[self.handle] = self

    def part(self, batch: slice, heads: slice) -> "MaskMod":
        """Return the same function, asked about some of the batch and of the heads."""
        return MaskMod(self.function, self.batch[batch], self.heads[heads], self.where)

    def visible(self, rows: range, keys: range, device: torch.device) -> Tensor:
        """Return a bool tensor that broadcasts to (B, H, I, J), of rank 4; true where it sees.

        ValueError where the function raises, or returns anything else.
        """
        lines = (self.batch, self.heads, rows, keys)
        indices = [
            torch.arange(line.start, line.stop, device=device).view(
                [-1 if axis == own else 1 for axis in range(4)]
            )
            for own, line in enumerate(lines)
        ]
        full = tuple(map(len, lines))
        rule = (
            f"{self.where}: mask_mod must be a function of (batch, head, query, key), integer "
            "tensors that broadcast, that returns a bool tensor which broadcasts to (batch, heads, "
            f"queries, keys) = {full}, got"
        )
        advice = "combine the indices by operators of torch, as in FlexAttention's mask_mod"
        try:
            with torch.no_grad():
                seen = self.function(*indices)
        except Exception as error:
            raise ValueError(f"{rule} {type(error).__name__}: {error}; {advice}") from error
        if not isinstance(seen, Tensor) or seen.dtype != torch.bool:
            got = seen.dtype if isinstance(seen, Tensor) else type(seen).__name__
            raise ValueError(f"{rule} {got}; {advice}")
        shape = (1,) * (4 - seen.dim()) + tuple(seen.shape)
        if len(shape) != 4 or any(a not in (1, b) for a, b in zip(shape, full, strict=True)):
            raise ValueError(f"{rule} one of {tuple(seen.shape)}; {advice}")
        return seen.to(device).view(shape)


_HELD: WeakValueDictionary[int, MaskMod] = WeakValueDictionary()


def held(handle: int | None) -> MaskMod | None:
    """Return the mask of a handle, which somebody must hold: an operator takes no function."""
    return None if handle is None else _HELD[handle]


class BlockTable(NamedTuple):
    """Which tiles are seen, and those that are seen in part."""

    table: Tensor
    """int32 (B or 1, H or 1, M, N): `FULL`, `EMPTY`, or where the tile is among `tiles`."""
    tiles: Tensor
    """bool (P, block_q, block_k); false past the last query and key."""


def block_table(
    mod: MaskMod, query_len: int, key_len: int, block_q: int, block_k: int, device: torch.device
) -> BlockTable:
    """Return the table of a mask, of tiles of the given sizes; it never holds the whole mask."""
    lines, partial, count = [], [], 0
    of_heads = len(mod.batch) * len(mod.heads) * block_q
    width = max(1, STRIP // (of_heads * block_k)) * block_k
    for rows in _blocks(query_len, block_q):
        strips = []
        for keys in _blocks(key_len, width):
            seen = mod.visible(rows, keys, device)
            seen = seen.expand(*seen.shape[:2], len(rows), len(keys))
            strip_BHN, tiles = _classified(seen, block_q, block_k, count)
            strips.append(strip_BHN)
            partial.append(tiles)
            count += len(tiles)
        lines.append(strips)
    sizes = [strip.shape[:2] for strips in lines for strip in strips]
    # a function may be broadcast over batch and heads in some strips alone
    batch_heads = torch.broadcast_shapes(*sizes)
    table = [torch.cat([x.expand(*batch_heads, -1) for x in strips], dim=2) for strips in lines]
    return BlockTable(torch.stack(table, dim=2).contiguous(), torch.cat(partial))


def _classified(seen_BHIJ: Tensor, block_q: int, block_k: int, first: int) -> tuple[Tensor, Tensor]:
    """Return the table of one line of tiles (B, H, N), and those seen in part, from `first` on."""
    rows, keys = seen_BHIJ.shape[2:]
    blocks = math.ceil(keys / block_k)
    padding = (0, blocks * block_k - keys, 0, block_q - rows)
    tiles = torch.nn.functional.pad(seen_BHIJ, padding).unflatten(3, (blocks, block_k))
    tiles = tiles.permute(0, 1, 3, 2, 4)
    counts_BHN = tiles.sum(dim=(3, 4))
    starts_N = torch.arange(blocks, device=seen_BHIJ.device) * block_k
    whole_N = rows * (keys - starts_N).clamp(max=block_k)
    in_part_BHN = (counts_BHN > 0) & (counts_BHN < whole_N)
    found = tiles[in_part_BHN]
    table_BHN = torch.where(counts_BHN > 0, FULL, EMPTY)
    numbers = torch.arange(first, first + len(found), device=seen_BHIJ.device)
    table_BHN[in_part_BHN] = numbers
    return table_BHN.int(), found


def _blocks(length: int, size: int) -> Iterator[range]:
    for start in range(0, length, size):
        yield range(start, min(start + size, length))
