"""W1, the exact 1-D Wasserstein-1 distance between the values of two tensors, or of two models.

What it is. For two samples of one size W1 is mean |sort(a) - sort(b)|: values pair up by rank. For
others it is the integral of |F_a^-1 - F_b^-1| over the merged quantile grid. It says nothing of
position: it never exceeds the mean absolute difference, and is zero for a permutation.

Which way. scipy's `wasserstein_distance` casts to FP64, sorts both samples and their concatenation,
and searches twice: 10.2 s for 1e7 values, where two FP32 sorts in place and a mean take 0.9 s and
agree to 5e-15. It is the oracle in the tests. Estimates are no substitute: 1e4
values drawn at random from 1e6 make W1 1.37 times too large, and a histogram by the leading 16 bits
of FP32 values is 25 % off at a drift of 1e-5.

All values of a model need not fit in memory. What fits is pooled and sorted. Formats of at most 16
bits have so few values that counting each of them gives the whole distribution in one pass. The
rest is cut into ranges of the number line that fit, each gathered and sorted in a pass of its own;
what one range leaves to the next is a number, the surplus: how many more values one side has had
so far. W1 is the integral of its size over the line, a sum of the values themselves, each with a
factor of +1 or -1. It is added up exactly (`exact_sums`): no cut and no order changes a bit.

Leaves out the pooled distance of sets of different sizes, which the weights of one architecture
never are.
"""

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stability.metrics.exact_sums import (
    ExactSum,
    Values,
    gap_sum,
    merged_gap_sum,
    weighted_sum,
)
from stability.metrics.sorting import sort_

__all__ = [
    "HELD",
    "Parts",
    "ValueRange",
    "Values",
    "count_codes",
    "counted_gap_sum",
    "counted_wasserstein",
    "cut_into_ranges",
    "gather",
    "group_bins",
    "non_finite",
    "pool",
    "pooled_wasserstein",
    "sort_values_",
    "walk",
    "wasserstein_1d",
    "wasserstein_sorted",
]

Parts = Collection[Tensor]
"""Tensors that can be walked through again and again, for example a mapping's `values()`."""
HELD = 2**26
"""Values held at once, both sides together: 256 MiB of FP32, 512 MiB of FP64."""

# Torch's own grain. So many values stay in the cache and on one thread: a sum depends on no thread
# count, and on a busy machine no thread waits for another (for 2^18 values at a time a copy takes
# 6 ms instead of 0.1 ms; 2 cores, torch 2.13).
_CHUNK = 2**15
# 1 MiB of FP32 stays in the cache, and is long enough for the 2^16 bins that each piece is counted
# into: 2.4 ns a value, 4.7 with pieces of 2^16 (1 core with AVX-512, numpy 2.4).
_PIECE = 2**18
_DIGIT = 16
"""Bits of a key that one histogram tells apart."""


def wasserstein_1d(a: Tensor, b: Tensor) -> float:
    """Return W1 between the flattened values of `a` and `b`, in their units.

    Inputs are unchanged, of any floating dtype and any two sizes. NaN anywhere gives NaN. Infinite
    values of one sign match each other at no distance; unmatched ones give infinity. ValueError if
    one is empty or holds no floating-point values.
    """
    return wasserstein_sorted(sort_values_(pool([a])), sort_values_(pool([b])))


def pool(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all values of `tensors`, flat and in order, on the first one's device.

    FP64 if any of them is, else FP32; either holds every value exactly. ValueError if one holds no
    floating-point values.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(
                f"wasserstein_1d: values must be floating-point, got {tensor.dtype}; convert them"
            )
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    sizes = [tensor.numel() for tensor in tensors]
    values = torch.empty(sum(sizes), dtype=wide, device=tensors[0].device)
    for part, tensor in zip(values.split(sizes), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor.detach())
    return values


def sort_values_(values: Tensor) -> Tensor:
    """Sort a flat FP32 or FP64 tensor in place, ascending with NaN last, and return it.

    On a CPU it is `sort_`: 1e7 FP32 values take numpy 0.06 s and torch, which also sorts indices,
    1.6 s (2 cores with AVX-512, numpy 2.4, torch 2.13).
    """
    if values.device.type == "cpu":
        sort_(values.numpy())
        return values
    return values.copy_(values.sort().values)


def wasserstein_sorted(a: Tensor, b: Tensor) -> float:
    """Return W1 between two flat tensors that are sorted already; else as `wasserstein_1d`."""
    if a.numel() == 0 or b.numel() == 0:
        raise ValueError(
            f"wasserstein_1d: a and b must hold values, got {a.numel()} and {b.numel()} of them; "
            "leave empty tensors out"
        )
    if a.numel() != b.numel():
        return _unequal(a.double().cpu(), b.double().cpu())
    return gap_sum(a, b).mean(a.numel())


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| where inf - inf is 0, not NaN."""
    return (a - b).abs_().masked_fill_(a == b, 0.0)


def _unequal(a: Tensor, b: Tensor) -> float:
    """Integrate |F_a^-1 - F_b^-1| over the quantiles at which either steps.

    Quantiles i/n and j/m are compared exactly as the integers i*m and j*n.
    """
    n, m = a.numel(), b.numel()
    edges = np.concatenate([np.arange(1, n + 1) * m, np.arange(1, m + 1) * n])
    edges.sort()  # np.union1d hashes first, and is 15 times slower at 2e7 edges
    widths = np.diff(edges, prepend=0)
    steps = widths > 0
    # the stretch that ends at edge e holds e - 1, whose rank an integer division gives exactly
    below, widths = torch.from_numpy(edges[steps] - 1), torch.from_numpy(widths[steps]).double()
    gaps = _gaps(a[below // m], b[below // n])
    return float(gaps.dot(widths / (n * m)))


def pooled_wasserstein(parts_a: Parts, parts_b: Parts, *, held: int = HELD) -> float:
    """Return W1 between all values of `parts_a` and all of `parts_b`, in their units.

    Both are walked through several times, one tensor at a time, so the `values()` of a lazy mapping
    are never in memory together; at most `held` values are copied. Passes are few for formats of 16
    bits, else one more for each `held` values. NaN and infinities count as in `wasserstein_1d`.
    ValueError if the two hold different numbers of values, or none, or values
    that are not floating-point.
    """
    sides = (parts_a, parts_b)
    count, other = (sum(tensor.numel() for tensor in parts) for parts in sides)
    if count != other or count == 0:
        raise ValueError(
            "pooled_wasserstein: parts_a and parts_b must hold equally many values, got "
            f"{count} and {other}; compare tensors of the same shapes"
        )
    formats = {tensor.dtype for parts in sides for tensor in parts}
    # what is not floating-point goes this way too: `pool` refuses it by its dtype
    if 2 * count <= held or not all(format.is_floating_point for format in formats):
        device = next(iter(parts_b)).device
        a, b = (sort_values_(pool([x.to(device) for x in parts])) for parts in sides)
        return wasserstein_sorted(a, b)
    if all(format.itemsize <= 2 for format in formats):
        return counted_wasserstein(*(count_codes(parts) for parts in sides))
    wide = torch.float64 if torch.float64 in formats else torch.float32
    return _by_ranges(sides, wide, held, count)


def _by_ranges(sides: tuple[Parts, Parts], wide: torch.dtype, held: int, count: int) -> float:
    """Return the mean of |x - y| over all `count` pairs of one rank, range by range."""
    in_a, in_b = (_count_non_finite(parts, wide) for parts in sides)
    if in_a[0] or in_b[0]:
        return math.nan
    # infinities of one sign are partners at no distance, but only in equal numbers
    if in_a != in_b:
        return math.inf
    total, surplus = ExactSum(), 0
    for part in cut_into_ranges(sides, wide, held):
        after = surplus + part.counts[0] - part.counts[1]
        if part.single:
            total += ExactSum.of(float(part.low), abs(surplus) - abs(after))
        else:
            a, b = (torch.from_numpy(gather(parts, part, side)) for side, parts in enumerate(sides))
            total += merged_gap_sum(a, b, surplus)
        surplus = after
    assert surplus == 0, "every value has its partner"
    return total.mean(count)


def _count_non_finite(parts: Parts, wide: torch.dtype) -> tuple[int, int, int]:
    """Return how many values are NaN, -inf and +inf."""
    nan = below = above = 0
    for values in walk(parts, wide):
        if not np.isfinite(values).all():
            nan += int(np.isnan(values).sum())
            below += int(np.isneginf(values).sum())
            above += int(np.isposinf(values).sum())
    return nan, below, above


@dataclass(frozen=True, slots=True)
class ValueRange:
    """Values from `low` to below `high`, and how many of them each side holds.

    `single` if all of them equal `low` and are too many to be stored.
    """

    low: np.floating
    high: np.floating
    counts: tuple[int, int]
    single: bool = False


def walk(parts: Parts, wide: torch.dtype) -> Iterator[Values]:
    """Yield all values as new arrays of the format `wide`, one tensor and piece at a time."""
    for tensor in parts:
        for piece in tensor.detach().cpu().flatten().split(_PIECE):
            yield _widen(piece, wide)
        del tensor, piece  # before the next one is loaded


def cut_into_ranges(sides: tuple[Parts, Parts], wide: torch.dtype, held: int) -> list[ValueRange]:
    """Return, in order, the ranges that hold all finite values, at most `held` of them each.

    A float's bits, with those of negative values turned around, are an integer key that orders as
    the values do. A histogram over the keys' leading 16 bits therefore cuts the line finely where
    values are dense. A bin that holds too many is cut by its next 16 bits, down to a single value,
    which may be there more than `held` times: it is counted, never stored. -0 counts as +0. Ranges
    without values are left out, and so are NaN and infinities.
    """
    limits = torch.finfo(wide)
    ends = np.array([limits.min, np.inf], torch.empty(0, dtype=wide).numpy().dtype)
    return list(_cut(sides, ends[0], ends[1], 8 * ends.itemsize - _DIGIT, held))


def gather(parts: Parts, within: ValueRange, side: int) -> Values:
    """Return, sorted, the values in the range of `parts`, which are its side 0 or 1."""
    found = np.empty(within.counts[side], within.low.dtype)
    filled = 0
    wide = torch.from_numpy(found).dtype
    for values in walk(parts, wide) if found.size else ():
        chosen = _select(values, within.low, within.high)
        found[filled : filled + chosen.size] = chosen
        filled += chosen.size
    assert filled == found.size, "the parts hold other values than before"
    sort_(found)
    return found


def _cut(
    sides: tuple[Parts, Parts], low: np.floating, high: np.floating, shift: int, held: int
) -> Iterator[ValueRange]:
    """Cut the values from `low` to below `high` by the 16 bits of their keys from `shift` up."""
    counts = np.stack([_histogram(parts, low, high, shift) for parts in sides])
    filled = np.flatnonzero(counts.sum(0))
    first = int(_keys(np.array([low]))[0]) >> shift >> _DIGIT << _DIGIT

    def edge(index: int) -> np.floating:
        return _value((first + index) << shift, low.dtype)

    for group in group_bins(counts[:, filled].sum(0), held):
        start, stop = int(filled[group[0]]), int(filled[group[-1]]) + 1
        in_a, in_b = (int(side[start:stop].sum()) for side in counts)
        if in_a + in_b <= held:
            yield ValueRange(edge(start), edge(stop), (in_a, in_b))
        elif shift == 0:
            yield ValueRange(edge(start), edge(start), (in_a, in_b), single=True)
        else:
            yield from _cut(sides, edge(start), edge(stop), shift - _DIGIT, held)


def group_bins(counts: Values, held: int) -> Iterator[range]:
    """Yield runs of neighbours whose counts add up to at most `held`; a larger one is alone."""
    start = total = 0
    for index, count in enumerate(counts.tolist()):
        if total + count > held and index > start:
            yield range(start, index)
            start, total = index, 0
        total += count
    if len(counts):
        yield range(start, len(counts))


def _histogram(parts: Parts, low: np.floating, high: np.floating, shift: int) -> Values:
    counts = np.zeros(2**_DIGIT, np.int64)
    for values in walk(parts, torch.from_numpy(np.empty(0, low.dtype)).dtype):
        digits = _keys(_select(values, low, high)) >> shift & (2**_DIGIT - 1)
        counts += np.bincount(digits.astype(np.intp), minlength=2**_DIGIT)
    return counts


def _widen(piece: Tensor, wide: torch.dtype) -> Values:
    """Return a copy of the values in the format `wide`, +0 for -0."""
    copy = torch.empty(piece.numel(), dtype=wide)
    for source, target in zip(piece.split(_CHUNK), copy.split(_CHUNK), strict=True):
        target.copy_(source)
    values = copy.numpy()
    # -0 + 0 is +0: one value, which as bits would have two keys
    values += 0.0
    return values


def _select(values: Values, low: np.floating, high: np.floating) -> Values:
    inside = values >= low
    inside &= values < high
    # in the first cut everything finite is inside, and needs no copy
    if inside.all():
        return values
    return np.compress(inside, values)


def _keys(values: Values) -> Values:
    """Return unsigned integers in the order of the values: all bits of a negative one turned."""
    bits = 8 * values.itemsize
    signed = values.view(f"i{values.itemsize}")
    # the shift of a signed integer copies the sign: all ones for a negative value, else zeros
    turned = (signed >> (bits - 1)).view(f"u{values.itemsize}")
    return signed.view(turned.dtype) ^ (turned | turned.dtype.type(1 << (bits - 1)))


def _value(key: int, wide: np.dtype) -> np.floating:
    """Return the value with this key."""
    bits = 8 * wide.itemsize
    negative = key < 1 << (bits - 1)
    pattern = key ^ ((1 << bits) - 1 if negative else 1 << (bits - 1))
    return np.array([pattern], f"u{wide.itemsize}").view(wide)[0]


Counts = dict[torch.dtype, NDArray[np.int64]]
"""By format, how many values have each of its bit patterns."""


def counted_wasserstein(counts_a: Counts, counts_b: Counts) -> float:
    """Return W1 between two samples of one size, of formats of at most 16 bits, from counts."""
    (nan, *in_a), (nan_b, *in_b) = non_finite(counts_a), non_finite(counts_b)
    if nan or nan_b:
        return math.nan
    # infinities of one sign are partners at no distance, but only in equal numbers
    if in_a != in_b:
        return math.inf
    count = sum(int(found.sum()) for found in counts_a.values())
    return counted_gap_sum(counts_a, counts_b).mean(count)


def non_finite(counts: Counts) -> tuple[int, int, int]:
    """Return how many values are NaN, -inf and +inf."""
    nan = below = above = 0
    for format, found in counts.items():
        values = _values_of(format)
        nan += int(found[np.isnan(values)].sum())
        below += int(found[values == -np.inf].sum())
        above += int(found[values == np.inf].sum())
    return nan, below, above


def counted_gap_sum(counts_a: Counts, counts_b: Counts) -> ExactSum:
    """Return the sum of |x - y| over the pairs of one rank, of what is finite, from counts."""
    points, steps = [], []
    for sign, side in ((1, counts_a), (-1, counts_b)):
        for format, counts in side.items():
            values = _values_of(format)
            present = np.flatnonzero((counts[: values.size] != 0) & np.isfinite(values))
            points.append(values[present])
            steps.append(sign * counts[present])
    values, changes = np.concatenate(points), np.concatenate(steps)
    # one value from two formats, or -0 and +0, follow each other at distance 0 in either order
    order = np.argsort(values)
    surplus = np.abs(np.cumsum(changes[order]))
    # the integral of the surplus over the line: what it was before a value less what it is after
    return weighted_sum(values[order], -np.diff(surplus, prepend=0))


def count_codes(parts: Parts) -> Counts:
    """Return by format, of 8 or 16 bits, how many values have each of its bit patterns."""
    counts = {}
    for tensor in parts:
        format, code = tensor.dtype, torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
        found = counts.setdefault(format, np.zeros(2 ** (8 * code.itemsize), np.int64))
        for piece in tensor.detach().cpu().flatten().view(code).split(_PIECE):
            found += np.bincount(piece.numpy(), minlength=found.size)
        del tensor, piece  # before the next one is loaded
    return counts


@functools.cache
def _values_of(format: torch.dtype) -> Values:
    """Return the value of every bit pattern of a format of 8 or 16 bits, in FP64."""
    codes = np.arange(2 ** (8 * format.itemsize), dtype=f"u{format.itemsize}")
    return torch.from_numpy(codes).view(format).double().numpy()
