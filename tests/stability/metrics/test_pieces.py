"""Pieces of sharded tensors: every value is counted once, at its own place."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from stability.metrics.pieces import Piece, pieces_of


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_places_are_those_of_the_whole_laid_flat(shape, data):
    whole = torch.arange(math.prod(shape)).reshape(shape)
    held = [data.draw(st.lists(st.integers(0, side - 1), max_size=4)) for side in shape]
    places = tuple(torch.tensor(each, dtype=torch.int64) for each in held)
    part = whole[torch.meshgrid(*places, indexing="ij")]
    piece = Piece(values=part, places=places, shape=tuple(shape))
    assert torch.equal(piece.indices(), part)


def test_one_process_counts_whole_tensors():
    pieces = pieces_of({"a": torch.randn(3, 2), "number": torch.tensor(4.0)})
    assert torch.equal(pieces["a"].indices(), torch.arange(6).reshape(3, 2))
    assert pieces["number"].values.tolist() == [4.0]
    assert pieces["number"].indices().tolist() == [0]


class DTensor:
    """One rank's part of a tensor over a mesh, without a process group, as `pieces_of` reads it."""

    def __init__(self, whole, mesh_shape, at, placements, first_rank=0):
        self.mesh = first_rank + torch.arange(math.prod(mesh_shape)).reshape(mesh_shape)
        self.placements, self.shape, self.device_mesh = placements, whole.shape, self
        self.mesh_shape, self.at, self.whole = mesh_shape, at, whole

    def detach(self):
        return self

    def size(self, dim):
        return self.mesh_shape[dim]

    def get_local_rank(self, dim):
        return self.at[dim]

    def to_local(self):
        box, cuts = self.whole, list(enumerate(self.placements))
        # FSDP2 cuts what tensor parallel ranks have cut: the mesh's second dimension comes first
        is_strided = isinstance(self.placements[0], _StridedShard)
        for dim, place in reversed(cuts) if is_strided else cuts:
            if not isinstance(place, Replicate):
                parts = box.chunk(self.mesh_shape[dim], place.dim)
                beyond = box.narrow(place.dim, 0, 0)
                box = parts[self.at[dim]] if self.at[dim] < len(parts) else beyond
        return box


LAYOUTS = {
    "FSDP": ((4,), [Shard(0)]),
    "tensor parallel, columns": ((4,), [Shard(1)]),
    "replicated": ((4,), [Replicate()]),
    "replicas of shards": ((2, 2), [Replicate(), Shard(0)]),
    "both": ((2, 2), [Shard(0), Shard(1)]),
    # FSDP2 cuts what tensor parallelism has cut along the same dimension
    "FSDP of rows": (
        (2, 2),
        [_StridedShard(0, split_factor=2), Shard(0)],
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 4)], ids=str)
def test_every_value_is_counted_by_one_rank(layout, shape):
    mesh_shape, placements = LAYOUTS[layout]
    whole = torch.arange(math.prod(shape), dtype=torch.float64).reshape(shape)
    seen = []
    for at in itertools.product(*map(range, mesh_shape)):
        piece = pieces_of({"w": DTensor(whole, mesh_shape, at, placements)})["w"]
        assert torch.equal(piece.indices().double(), piece.values)
        seen += piece.values.flatten().tolist()
    assert sorted(seen) == whole.flatten().tolist()


@pytest.mark.parametrize("replica", [0, 1])
def test_of_replicas_with_meshes_of_their_own_the_first_one_counts(replica):
    part = DTensor(torch.ones(4), (2,), (1,), [Shard(0)], first_rank=2 * replica)
    assert pieces_of({"w": part})["w"].values.numel() == (0 if replica else 2)


def test_sums_that_are_not_added_up_are_refused():
    with pytest.raises(ValueError, match="pieces_of: w must hold values"):
        pieces_of({"w": DTensor(torch.ones(2), (2,), (0,), [Partial()])})


@pytest.mark.parametrize("rank", [0, 1])
def test_of_plain_tensors_rank_0_counts_all(rank, monkeypatch):
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda group: rank)
    pieces = pieces_of({"w": torch.ones(2, 3), "number": torch.tensor(1.0)})
    assert [len(piece.values) for piece in pieces.values()] == ([0, 0] if rank else [2, 1])
    assert [piece.indices().numel() for piece in pieces.values()] == ([0, 0] if rank else [6, 1])
