"""Pieces: the values of a model's tensors that this rank counts, whatever lays them out over ranks.

Every value of a tensor is in the piece of exactly one rank, so a quantity is each rank's own share,
joined. A tensor that is sharded (`DTensor`) gives the part that this rank holds; where several
ranks hold the same part, the first of them counts it, and the others' pieces are empty. So it is
where its mesh leaves ranks out, as that of one replica does: the replica of rank 0 counts. A plain
tensor is whole on every rank, as DDP keeps it, and rank 0 counts it. In one process every piece is
a whole tensor.

Leaves out what is measured of the pieces.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["Piece", "held_values", "part_of", "pieces_of"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a tensor: its values, and where they are in the whole."""

    values: Tensor
    """Of as many dimensions as `places` has; none where another rank counts them."""
    places: tuple[Tensor, ...]
    """Of each dimension, the indices in the whole tensor that are held: int64, on the CPU."""
    shape: tuple[int, ...]
    """Of the whole tensor."""

    def indices(self) -> Tensor:
        """Return each value's place in the whole tensor laid flat, int64 of the values' shape."""
        indices = torch.zeros((), dtype=torch.int64, device=self.values.device)
        for place, side in zip(self.places, self.shape, strict=True):
            indices = indices.unsqueeze(-1) * side + place.to(indices.device)
        return indices


def pieces_of(state: Mapping[str, Tensor], group: Any = None) -> dict[str, Piece]:
    """Return the piece of each tensor in `state` that this rank counts, by name, without a copy.

    A tensor of no dimensions is given one, of a single value. Plain tensors are counted by rank 0
    of the process group, the default one for None. Nothing is sent, so every rank may call it at
    any time. ValueError for a DTensor whose values are sums that are not added up yet.
    """
    return {name: _piece(name, tensor.detach(), group) for name, tensor in state.items()}


def part_of(whole: Tensor, like: Tensor) -> Tensor:
    """Return the part of a tensor that this rank holds if it is laid out as `like`, a DTensor."""
    places = [torch.arange(side) for side in whole.shape]
    _cut(like, places)
    for dim, place in enumerate(places):
        if len(place) < whole.shape[dim]:
            whole = whole.index_select(dim, place.to(whole.device))
    return whole


def held_values(tensors: Iterable[Tensor], group: Any = None) -> Iterator[Tensor]:
    """Yield the values of each tensor that this rank counts, as `pieces_of` does, without places.

    The tensors are named by their number where one is refused.
    """
    for number, tensor in enumerate(tensors):
        values, is_first = tensor.detach(), _is_rank_0(group)
        if _is_sharded(values):
            sharded: Any = values
            is_first = _is_first(f"tensor {number}", sharded, group)
            values = sharded.to_local()
        values = values.reshape(-1)
        yield values if is_first else values[:0]


def _piece(name: str, tensor: Tensor, group: Any) -> Piece:
    shape = tuple(tensor.shape) or (1,)
    places, is_first = [torch.arange(side) for side in shape], _is_rank_0(group)
    if _is_sharded(tensor):
        sharded: Any = tensor
        is_first = _is_first(name, sharded, group)
        _cut(sharded, places)
        tensor = sharded.to_local()
    values = tensor.reshape([len(place) for place in places])
    if not is_first:
        values, places[0] = values[:0], places[0][:0]
    return Piece(values=values, places=tuple(places), shape=shape)


def _is_rank_0(group: Any) -> bool:
    return not dist.is_initialized() or dist.get_rank(group) == 0


def _is_first(name: str, tensor: Any, group: Any) -> bool:
    """Return whether no rank before this one holds the same part."""
    first = 0 if group is None or not dist.is_initialized() else dist.get_global_rank(group, 0)
    is_first = first in tensor.device_mesh.mesh
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise ValueError(
                f"pieces_of: {name} must hold values, got the unreduced sums of "
                f"{tensor.placements}; redistribute it first"
            )
        if placement.is_replicate():
            is_first &= tensor.device_mesh.get_local_rank(mesh_dim) == 0
    return is_first


def _cut(tensor: Any, places: list[Tensor]) -> None:
    """Cut `places` down to what this rank holds."""
    for mesh_dim, placement in enumerate(tensor.placements):
        at, ranks = tensor.device_mesh.get_local_rank(mesh_dim), tensor.device_mesh.size(mesh_dim)
        if placement.is_replicate():
            continue
        # torch's own cut of the indices: FSDP2 over tensor parallel ranks leaves strides in it
        dim = placement.dim
        along = places[dim].reshape((1,) * dim + (-1,))
        parts, _ = placement._split_tensor(along, ranks, with_padding=False, contiguous=False)
        places[dim] = parts[at].reshape(-1) if at < len(parts) else places[dim][:0]


def _is_sharded(tensor: Tensor) -> bool:
    # by its class's name: most processes never load DTensor
    return type(tensor).__name__ == "DTensor"
