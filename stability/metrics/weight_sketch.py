"""A linear sketch of a model's weights: how far any two runs are apart, without their snapshots.

What it is. The CountSketch of Charikar, Chen and Farach-Colton (2002): value i of a tensor is added
with the sign s(i) to the bucket b(i) of 2^16. Both are bits of a hash of the tensor's name and i,
so that they are the same in every run, under any sharding. The map is linear: the difference of two
sketches is the sketch of the difference d.

How near it comes. Over random signs and buckets the square of the sketch's norm is |d|^2 on average
(cross terms have random signs), with variance below 2 |d|^4 / buckets: two values share a bucket
with probability 1 / buckets at most, and then add 2 d_i d_j. So the L2 distance has a relative sd
of at most 1 / sqrt(2 buckets) = 0.28 %: within 1 % at 3.6 sd, whatever the model's size. A dot
product has an sd of at most |a| |b| sqrt((1 + cosine^2) / buckets), so a cosine is within 0.02 at
3.6 sd. The map is the same for all, so the errors of one fixed difference do not average out.

Each 65,536 values that follow one another in a tensor go to buckets of their own. So a difference
inside such a block is exact, of whatever kind: one changed value, one bias. Between blocks values
do meet. Of k alike values that differ, each in a block of its own, some two do with probability
k^2 / 2^17, and then the distance is off by 1 / k: at k = 97 beyond 1 % in one of 14 cases. So it is
where few values dominate; a training changes nearly all of them alike.

Measured under 300 maps each, over 600,000 values: rms 0.25 to 0.26 %, and at most 0.72 % where the
differences are Gaussian, 0.93 % where they are constant, 0.97 % where nine far rows changed, 1.32 %
where they have the tails of 1 / u.

How it is added. Exactly: a value is rounded once to a multiple of 2^-64 (half to even; FP32 values
from 2^-41 = 4.5e-13 on are such multiples), and its three digits of 32 bits are added to 64-bit
integers, which hold 2^31 values a bucket, of 1e14 weights. So ranks may add in any order, and one
all-reduce joins them:

    joined = local_weight_sketch(pieces_of(state))      # int64, 1.5 MB
    torch.distributed.all_reduce(joined)
    sketch = finished_weight_sketch(joined, pieces)     # FP64 (65536,), 512 KB

Only the finished sums are rounded, to FP64. Equal weights are 0 apart exactly; of others the
distance is off by less than 2^-52 of the weights' norm, and 2^-64 sqrt(n), besides the above.

Values that are not finite or from 2^31 on have no digits. They are counted, and a sketch with any
of them is NaN away from every other. Counters and masks are no weights, and left out.

What it costs. On a busy CPU 8 to 9 ns a value, in memory 1.5 MB. Leaves out the file
(`records.weight_sketches`) and gradients, whose sketches are small and are added as floats
(`sketch`).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from stability.metrics.mixing import GOLDEN, key_of, mixed, signed64
from stability.metrics.numbered_values import NumberedValues, numbered_values
from stability.metrics.pieces import Piece, pieces_of

__all__ = [
    "RELATIVE_SD",
    "WEIGHT_BUCKETS",
    "WeightSketch",
    "finished_weight_sketch",
    "local_weight_sketch",
    "weight_sketch",
]

WEIGHT_BUCKETS = 2**16
RELATIVE_SD = 1 / math.sqrt(2 * WEIGHT_BUCKETS)
"""Of an L2 distance, at most."""
_DIGITS = 3
_16_BITS = 2**16 - 1
_BASE = 2.0**32
_LIMIT = 2.0**31
"""Values from here on have no digits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSketch:
    """The sketch of one set of weights."""

    buckets: Tensor
    """FP64 `(WEIGHT_BUCKETS,)`, on the CPU."""
    outline: str
    """A hash of the weights' names and shapes: only sketches of one outline can be compared."""
    outside: int = 0
    """Values that are not finite, or from 2^31 on."""

    @property
    def norm(self) -> float:
        """The L2 norm of all weights, as near as a distance; NaN if a value is outside."""
        return self._length(self.buckets, self.outside)

    def distance(self, other: "WeightSketch") -> float:
        """Return the L2 distance between the weights; NaN if a value of either is outside.

        ValueError if the two are of models with other names or shapes.
        """
        self._check(other)
        return self._length(self.buckets - other.buckets, self.outside + other.outside)

    def cosine(self, other: "WeightSketch") -> float:
        """Return the cosine of the angle between the weights, which is 1 for equal sketches.

        NaN for a norm of 0, and where a distance is. ValueError as there.
        """
        self._check(other)
        norms = self.norm * other.norm
        if norms == 0 or math.isnan(norms):
            return math.nan
        if torch.equal(self.buckets, other.buckets):
            return 1.0
        dot = math.fsum((self.buckets * other.buckets).tolist())
        return max(-1.0, min(1.0, dot / norms))

    def _check(self, other: "WeightSketch") -> None:
        if self.outline != other.outline:
            raise ValueError(
                "WeightSketch: both must be of weights of the same names and shapes, got outlines "
                f"{self.outline[:16]} and {other.outline[:16]}; compare runs of one model"
            )

    @staticmethod
    def _length(buckets: Tensor, outside: int) -> float:
        # fsum: the same bits on any machine
        return math.nan if outside else math.sqrt(math.fsum(buckets.square().tolist()))


def weight_sketch(state: Mapping[str, Tensor]) -> WeightSketch:
    """Return the sketch of the floating-point weights of a state that this process holds whole."""
    pieces = pieces_of(state)
    return finished_weight_sketch(local_weight_sketch(pieces), pieces)


def local_weight_sketch(pieces: Mapping[str, Piece]) -> Tensor:
    """Return what this rank's weights add to the sketch, int64 `(3 * buckets + 1,)`.

    It is on the weights' device. The sum over ranks is that of all weights. The last number counts
    values without digits.
    """
    device = next(iter(pieces.values())).values.device if pieces else torch.device("cpu")
    total = torch.zeros(_DIGITS * WEIGHT_BUCKETS + 1, dtype=torch.int64, device=device)
    for name, piece in _weights(pieces).items():
        keys = key_of("signs", name), key_of("buckets", name)
        for part in numbered_values(piece):
            add = _add_on_cpu if total.device.type == "cpu" else add_by_torch
            total[-1] += add(part, keys, total[:-1].view(_DIGITS, WEIGHT_BUCKETS))
    return total


def finished_weight_sketch(joined: Tensor, pieces: Mapping[str, Piece]) -> WeightSketch:
    """Return the sketch from the sum over ranks.

    `pieces` are any rank's: of them only names and shapes are read.
    """
    digits = joined[:-1].view(_DIGITS, WEIGHT_BUCKETS).cpu().clone()
    for place in range(_DIGITS - 1):
        # digits between -2^31 and 2^31: of those that are not 0 none cancels the next larger one
        carried = (digits[place] + 2**31) >> 32
        digits[place] -= carried << 32
        digits[place + 1] += carried
    low, middle, high = digits
    sums = (low.double() / _BASE**2 + middle.double() / _BASE) + high.double()
    shapes = {name: piece.shape for name, piece in _weights(pieces).items()}
    outline = key_of(*(f"{name}{shapes[name]}" for name in sorted(shapes)))
    return WeightSketch(buckets=sums, outline=f"{outline:016x}", outside=int(joined[-1]))


def _weights(pieces: Mapping[str, Piece]) -> dict[str, Piece]:
    return {name: piece for name, piece in pieces.items() if piece.values.is_floating_point()}


def _add_on_cpu(part: NumberedValues, keys: tuple[int, int], digits: Tensor) -> int:
    from stability.metrics.weight_loops import add_to_sketch  # compiled, or read from the cache

    places = np.empty(0, np.uint64)
    if part.places is not None:
        places = part.places.numpy().view(np.uint64)
    values = _widened(part.values).contiguous().numpy()
    return int(
        add_to_sketch(
            values, np.uint64(part.start), places, np.array(keys, np.uint64), digits.numpy()
        )
    )


def add_by_torch(part: NumberedValues, keys: tuple[int, int], digits: Tensor) -> int:
    """Do what `_add_on_cpu` does, by torch's operators: on any device, and slower on a CPU."""
    places = part.all_places()
    signs = mixed((places >> 6) * signed64(GOLDEN) + signed64(keys[0]))
    is_turned = ((signs >> (places & 63)) & 1) == 1
    values = _widened(part.values).double()
    has_digits = values.abs() < _LIMIT
    size = torch.where(has_digits, values.abs(), 0.0) * _BASE
    whole = size.long()
    low = ((size - whole.double()) * _BASE).round().long()
    is_negative = (values < 0) != is_turned
    buckets = buckets_of(places, keys[1])
    for into, digit in zip(digits, (low, whole & (2**32 - 1), whole >> 32), strict=True):
        into.scatter_add_(0, buckets, torch.where(is_negative, -digit, digit))
    return int((~has_digits).sum())


def buckets_of(places: Tensor, key: int) -> Tensor:
    """Return the bucket of each place, int64: in a block of 2^16 places a permutation of all.

    The hash of the block has four parts of 16 bits. The last one is added in the end, so that any
    bucket is as likely for a place; the others part neighbours, which would else meet those of
    another block side by side.
    """
    turned = mixed((places >> 16) * signed64(GOLDEN) + signed64(key))
    x = (places ^ turned) & _16_BITS
    x = (x * ((turned >> 16) | 1)) & _16_BITS
    x = x ^ (x >> 7)
    x = (x * ((turned >> 32) | 1)) & _16_BITS
    x = x ^ (x >> 9)
    return (x + (turned >> 48)) & _16_BITS


def _widened(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()
