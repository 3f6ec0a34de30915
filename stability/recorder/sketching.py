"""Makes the hash and the sketch of a run's weights as they are stored, of all or of parts of them.

Leaves out the file (`records.weight_sketches`), and how either is computed (`metrics`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from stability.metrics.noise_moved import vector_names
from stability.metrics.pieces import Piece
from stability.metrics.weight_hash import finished_weight_hash, local_weight_hash
from stability.metrics.weight_sketch import finished_weight_sketch, local_weight_sketch
from stability.records.weight_sketches import StoredSketch

__all__ = ["stored_sketch"]


def stored_sketch(
    pieces: Mapping[str, Piece], join: Callable[[Tensor], Tensor] = lambda own: own
) -> StoredSketch:
    """Return the hash and the sketch of weights of which this rank has `pieces`.

    `join` returns the sum over ranks of an int64 tensor, which wraps around: one process has all.
    """
    hashed, sketch, vectors = (
        local_weight_hash(pieces),
        local_weight_sketch(pieces),
        _local_vectors(pieces),
    )
    parts = [hashed, sketch, *vectors.values()]
    joined = join(torch.cat(parts)).split([len(part) for part in parts])
    found = finished_weight_sketch(joined[1], pieces)
    return StoredSketch(
        weights=finished_weight_hash(joined[0], pieces),
        outline=found.outline,
        outside=found.outside,
        buckets=found.buckets,
        vectors={
            name: joined.view(torch.float64).cpu().to(_stored_as(pieces[name]))
            for name, joined in zip(vectors, joined[2:], strict=True)
        },
    )


def _local_vectors(pieces: Mapping[str, Piece]) -> dict[str, Tensor]:
    """Return the bits of each vector's values in FP64, int64; 0 where another rank has the value.

    Empty where vectors are most of the model, as of weights that were laid flat.
    """
    weights = {name: x for name, x in pieces.items() if x.values.is_floating_point()}
    found = {}
    for name in vector_names({name: piece.shape for name, piece in weights.items()}):
        piece = weights[name]
        whole = torch.zeros(piece.shape, dtype=torch.int64, device=piece.values.device)
        whole[piece.indices().flatten()] = piece.values.double().flatten().view(torch.int64)
        found[name] = whole
    return found


def _stored_as(piece: Piece) -> torch.dtype:
    return torch.float64 if piece.values.dtype == torch.float64 else torch.float32
