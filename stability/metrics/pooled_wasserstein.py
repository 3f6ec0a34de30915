"""The exact W1 between all values of two sets of tensors, in bounded memory.

What fits is pooled and sorted (`wasserstein`); more is cut into ranges that fit (`value_ranges`),
each gathered and sorted in a pass of its own. Values pair up by rank, so what one range leaves to
the next is a number, the surplus: how many more values one side has had so far. The distance of a
pair is the sum of its parts in all ranges that it spans. Formats of 16 bits have so few values that
counting each of them gives the whole distribution, in one pass.

Leaves out sets of different sizes, which the weights of one architecture never are.
"""

import math

import numpy as np
import torch

from stability.metrics.value_ranges import Parts, Values, cut_into_ranges, gather, walk
from stability.metrics.wasserstein import pool, sort_values_, wasserstein_sorted

__all__ = ["HELD", "pooled_wasserstein"]

HELD = 2**26
"""Values held at once, both sides together: 256 MiB of FP32, 512 MiB of FP64."""

_CHUNK = 2**15  # as in `wasserstein`


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
    if 2 * count <= held or not all(format.is_floating_point for format in formats):
        device = next(iter(parts_b)).device
        a, b = (sort_values_(pool([x.to(device) for x in parts])) for parts in sides)
        return wasserstein_sorted(a, b)
    with np.errstate(over="ignore"):  # what is beyond FP64's range is infinite
        if all(format.itemsize <= 2 for format in formats):
            return _by_counting(sides) / count
        wide = torch.float64 if torch.float64 in formats else torch.float32
        return _by_ranges(sides, wide, held) / count


def _by_ranges(sides: tuple[Parts, Parts], wide: torch.dtype, held: int) -> float:
    """Return the sum of |x - y| over all pairs of one rank, range by range."""
    in_a, in_b = (_count_non_finite(parts, wide) for parts in sides)
    if in_a[0] or in_b[0]:
        return math.nan
    if in_a != in_b:
        return math.inf
    terms, surplus, edge = [0.0], 0, 0.0
    for part in cut_into_ranges(sides, wide, held):
        if part.single:
            a = b = np.empty(0)
            start = end = float(part.low)
        else:
            a, b = (gather(parts, part, side) for side, parts in enumerate(sides))
            start = min(float(values[0]) for values in (a, b) if values.size)
            end = max(float(values[-1]) for values in (a, b) if values.size)
        terms.append(abs(surplus) * (start - edge) if surplus else 0.0)
        ahead, behind = (a, b) if surplus >= 0 else (b, a)
        terms += _inside(ahead, behind, abs(surplus), start, end)
        surplus += part.counts[0] - part.counts[1]
        edge = end
    assert surplus == 0, "every value has its partner"
    return float(np.sum(terms))


def _inside(
    ahead: Values, behind: Values, surplus: int, start: float, end: float
) -> tuple[float, ...]:
    """Return what lies between `start` and `end` of the distances of all pairs that reach there.

    `ahead` has had `surplus` values more below `start`; they are partners of the first of `behind`.
    """
    late, behind = behind[:surplus], behind[surplus:]
    pairs = min(ahead.size, behind.size)
    passing = surplus - late.size
    return (
        _distance(late, start),
        passing * (end - start) if passing else 0.0,
        _distance(ahead[:pairs], behind[:pairs]),
        _distance(ahead[pairs:], end),
        _distance(behind[pairs:], end),
    )


def _distance(x: Values, y: Values | float) -> float:
    """Return the sum of |x - y| in FP64."""
    sums = [0.0]
    for at in range(0, x.size, _CHUNK):
        other = y[at : at + _CHUNK] if isinstance(y, np.ndarray) else y
        sums.append(np.abs(x[at : at + _CHUNK].astype(np.float64) - other).sum())
    return float(np.sum(sums))


def _count_non_finite(parts: Parts, wide: torch.dtype) -> tuple[int, int, int]:
    """Return how many values are NaN, -inf and +inf."""
    nan = below = above = 0
    for values in walk(parts, wide):
        if not np.isfinite(values).all():
            nan += int(np.isnan(values).sum())
            below += int(np.isneginf(values).sum())
            above += int(np.isposinf(values).sum())
    return nan, below, above


def _by_counting(sides: tuple[Parts, Parts]) -> float:
    """Return the sum of |x - y| over all pairs of one rank, of formats of at most 16 bits."""
    points, steps = [], []
    for sign, parts in zip((1, -1), sides, strict=True):
        for format, counts in _count_codes(parts).items():
            present = np.flatnonzero(counts)
            points.append(_values_of(format)[present])
            steps.append(sign * counts[present])
    values, changes = np.concatenate(points), np.concatenate(steps)
    if np.isnan(values).any():
        return math.nan
    if changes[values == -math.inf].sum() or changes[values == math.inf].sum():
        return math.inf
    finite = np.isfinite(values)
    values, changes = values[finite], changes[finite]
    order = np.argsort(values)
    surplus = np.abs(np.cumsum(changes[order])[:-1])
    return float((surplus * np.diff(values[order])).sum())


def _count_codes(parts: Parts) -> dict[torch.dtype, Values]:
    """Return by format how many values have each of its bit patterns."""
    counts = {}
    for tensor in parts:
        format, code = tensor.dtype, torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
        found = counts.setdefault(format, np.zeros(2 ** (8 * code.itemsize), np.int64))
        for piece in tensor.detach().cpu().flatten().view(code).split(2**18):
            found += np.bincount(piece.numpy(), minlength=found.size)
        del tensor, piece  # before the next one is loaded
    return counts


def _values_of(format: torch.dtype) -> Values:
    """Return the value of every bit pattern of a format of 8 or 16 bits, in FP64."""
    codes = np.arange(2 ** (8 * format.itemsize), dtype=f"u{format.itemsize}")
    return torch.from_numpy(codes).view(format).double().numpy()
