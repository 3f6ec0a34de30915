"""Makes the hash and the sketch of a run's weights as they are stored, of all or of parts of them.

Leaves out the file (`records.weight_sketches`), and how either is computed (`metrics`).
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

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
    hashed = local_weight_hash(pieces)
    joined = join(torch.cat([hashed, local_weight_sketch(pieces)]))
    found = finished_weight_sketch(joined[len(hashed) :], pieces)
    return StoredSketch(
        weights=finished_weight_hash(joined[: len(hashed)], pieces),
        outline=found.outline,
        outside=found.outside,
        buckets=found.buckets,
    )
