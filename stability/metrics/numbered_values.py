"""The values of a piece laid flat, in portions, each value with its place in the whole tensor.

What is counted value by value (`weight_hash`, `weight_sketch`) needs to know of each value which
one of the tensor it is, and should hold no second copy of a large tensor. Most pieces are a whole
tensor or rows of one, whose places are a range: then only its start is given. Leaves out what ranks
hold (`pieces`).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stability.metrics.pieces import Piece

__all__ = ["NumberedValues", "numbered_values"]

_PORTION = 2**22
"""Values at a time, unless one row has more."""


@dataclass(frozen=True, slots=True)
class NumberedValues:
    """Some values, `(n,)`, and their places in the whole tensor laid flat."""

    values: Tensor
    start: int
    """The first one's place, and the others follow; 0 where `places` says them all."""
    places: Tensor | None = None
    """Int64 `(n,)` on the values' device."""

    def all_places(self) -> Tensor:
        """Return the places of all values, int64 `(n,)` on their device."""
        if self.places is not None:
            return self.places
        return torch.arange(self.start, self.start + len(self.values), device=self.values.device)


def numbered_values(piece: Piece) -> Iterator[NumberedValues]:
    """Yield every value of a piece once, in portions of whole rows; none of an empty one."""
    rows = len(piece.places[0])
    if not piece.values.numel():
        return
    row_size = piece.values.numel() // rows
    step = max(1, _PORTION // row_size)
    is_range = all(
        len(place) == side for place, side in zip(piece.places[1:], piece.shape[1:], strict=True)
    )
    for first in range(0, rows, step):
        values = piece.values[first : first + step].reshape(-1)
        held = piece.places[0][first : first + step]
        begin = int(held[0])
        if is_range and torch.equal(held, torch.arange(begin, begin + len(held))):
            yield NumberedValues(values, begin * math.prod(piece.shape[1:]))
            continue
        part = Piece(
            values=piece.values[first : first + step],
            places=(held, *piece.places[1:]),
            shape=piece.shape,
        )
        yield NumberedValues(values, 0, part.indices().reshape(-1))
