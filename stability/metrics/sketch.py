"""A linear sketch of a long vector: few numbers that keep norms and dot products.

Errors of a model's gradient at many steps are to be multiplied pair by pair, which would take all
of them to be kept whole. A sketch is a fixed random linear map into `buckets` numbers, so that the
sketch of a sum is the sum of the sketches, and the dot product of two sketches is that of the
vectors, on average over the map. For unit vectors x and y its standard deviation is at most
sqrt((1 + (x.y)^2) / buckets): 2.2 to 3.1 % at 2,048. A vector that is no longer than that is kept
as it is.

This is the CountSketch of Charikar, Chen and Farach-Colton (2002): element i is added with the sign
s(i) to the bucket b(i). Both come from a counter-based hash of i, so nothing is drawn or stored.
The vector is laid out in rows of one element a bucket, and each row is turned by a hash of its
number: elements of one row never collide, those of two rows do with probability 1 / buckets, as in
the original. The sum runs over rows in a fixed order on every device, where a scatter on CUDA adds
in any order. Leaves out what the vectors are, and weights, which ranks hold parts of
(`weight_sketch`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from stability.metrics.mixing import GOLDEN, mixed, signed64

__all__ = ["SKETCH_BUCKETS", "sketch"]

SKETCH_BUCKETS = 2048
"""8 kB in FP32."""

_ROWS_PER_HASH = 64
"""One hash of 64 bits has the signs of a bucket's column in so many rows."""

_ELEMENTS = 1 << 62
"""Where the counters of elements begin; those of rows begin at 0."""

_MASK = (1 << 64) - 1


def sketch(parts: Sequence[Tensor], buckets: int = SKETCH_BUCKETS) -> Tensor:
    """Return the sketch of `parts`, tensors laid end to end, in FP64 `(buckets,)`.

    Elements are those of each part in row-major order, in any floating dtype. The same parts give
    the same bits. ValueError for no bucket at all.
    """
    if buckets < 1:
        raise ValueError(f"sketch: buckets must be >= 1, got {buckets}; 2048 keep 3 %")
    if not parts:
        return torch.zeros(buckets, dtype=torch.float64)
    flat = torch.cat([part.detach().flatten() for part in parts])
    missing = -flat.numel() % buckets or (0 if flat.numel() else buckets)
    rows = F.pad(flat, (0, missing)).view(-1, buckets)
    if len(rows) == 1:
        return rows[0].double()
    total = flat.new_zeros(buckets, dtype=torch.float64)
    hashes = columns = torch.arange(buckets, device=flat.device) + _ELEMENTS
    # row by row, so that all of it stays in the cache: in one piece it takes 8 times as long
    for number, row in enumerate(rows):
        block, bit = divmod(number, _ROWS_PER_HASH)
        if bit == 0:
            hashes = mixed((columns + block + 1) * signed64(GOLDEN))
        signed = torch.where(((hashes >> bit) & 1) == 1, row, -row).double()
        turn = _mixed(number) % buckets
        total[turn:] += signed[: buckets - turn]
        total[:turn] += signed[buckets - turn :]
    return total


def _mixed(counter: int) -> int:
    """Return 64 mixed bits of a counter: SplitMix64 (Steele, Lea and Flood, 2014)."""
    z = (counter + 1) * GOLDEN & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)
