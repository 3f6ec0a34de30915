"""W1 of all values of a model from its parameters' sorted values: only short ranges sort again.

Two flat arrays hold the parameters of either side one behind the other, each sorted: runs. The line
is cut where samples of the runs say, into ranges of some thousand values, which stay in the cache:
a range's values are found in each run by searching, copied together, sorted there, and added up
(`add_merged`). Ranges are shared out among threads; sums are exact, so no number of threads changes
a bit. Leaves out values that are not finite.
"""

from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from stability.metrics.exact_sums import ExactSum, Values, empty_bins, sum_of_bins
from stability.metrics.sorting import sort_

__all__ = ["runs_gap_sum"]

_RANGE = 2**14
"""Values of a range, both sides together: 64 kB of FP32 stay in the cache."""
_PER_RUN = 64
_STRIDE = 2**8
"""One value of a run in so many is a sample."""


def runs_gap_sum(a: Values, b: Values, starts: NDArray[np.int64], threads: int) -> ExactSum:
    """Return the sum of |x - y| over the pairs of one rank of all values of a and of b.

    Flat, finite, and of one format; run i of either is sorted and lies from `starts[i]` to before
    `starts[i + 1]`. Besides a and b, memory holds some ranges and an eighth of their values.
    """
    cuts = _cuts((a, b), starts, _bounds(a, b, starts))
    # (sides, ranges), and how many more values a has below each range
    counts = np.diff(cuts.sum(2), axis=1)
    after = np.cumsum(counts[0] - counts[1])
    surplus = [0, *after.tolist()]
    edges = np.linspace(0, after.size, min(threads, after.size) + 1).astype(int).tolist()

    from stability.metrics.exact_loop import add_merged, gather_runs  # heavy: numba

    def add(first: int, last: int) -> ExactSum:
        bins, room = empty_bins(), np.empty((2, counts[:, first:last].max()), a.dtype)
        for at, sizes in enumerate(counts[:, first:last].T.tolist(), first):
            here = cuts[:, at : at + 2]
            if sum(sizes) > 2 * _RANGE and _add_single((a, b), here, surplus[at : at + 2], bins):
                continue
            near = [into[:size] for into, size in zip(room, sizes, strict=True)]
            gather_runs(a, b, here, near[0], near[1])
            sort_(near[0])
            sort_(near[1])
            add_merged(near[0], near[1], surplus[at], bins)
        return sum_of_bins(bins)

    if len(edges) == 2:
        return add(*edges)
    with ThreadPoolExecutor(len(edges) - 1) as pool:
        return sum(pool.map(add, edges[:-1], edges[1:]), ExactSum())


def _bounds(a: Values, b: Values, starts: NDArray[np.int64]) -> Values:
    """Return where the line is cut, ascending, without its two ends."""
    runs = pairwise(starts.tolist())
    samples = [side[low:high][_STRIDE // 2 :: _STRIDE] for low, high in runs for side in (a, b)]
    # of many runs the ranges are longer: where each begins in each run takes a 16th of FP32 values
    length = max(_RANGE, _PER_RUN * (starts.size - 1))
    chosen = np.sort(np.concatenate(samples))[:: length // _STRIDE]
    # a value that fills a range is one of its own: it needs no room
    tied = chosen[1:][chosen[1:] == chosen[:-1]]
    return np.unique(np.concatenate([chosen, np.nextafter(tied, np.inf, dtype=a.dtype)]))


def _cuts(sides: tuple[Values, Values], starts: NDArray[np.int64], bounds: Values) -> NDArray:
    """Return (sides, ranges + 1, runs): where each range of each run begins, and the last ends."""
    cuts = np.empty((2, starts.size - 1, bounds.size + 2), np.int64)
    cuts[:, :, 0], cuts[:, :, -1] = starts[:-1], starts[1:]
    for values, rows in zip(sides, cuts, strict=True):
        for row, (low, high) in zip(rows, pairwise(starts.tolist()), strict=True):
            row[1:-1] = low + np.searchsorted(values[low:high], bounds)
    return np.ascontiguousarray(cuts.transpose(0, 2, 1))


def _add_single(
    sides: tuple[Values, Values], cuts: NDArray, surplus: list[int], bins: NDArray
) -> bool:
    """Add a range of which all values are one, and return whether it is such a range."""
    from stability.metrics.exact_loop import add_repeated  # heavy: numba

    ends: list[float] = []
    for values, (begins, after) in zip(sides, cuts, strict=True):
        filled = after > begins
        ends += [*values[begins[filled]].tolist(), *values[after[filled] - 1].tolist()]
    if min(ends) == max(ends):
        add_repeated(ends[0], abs(surplus[0]) - abs(surplus[1]), bins)
    return min(ends) == max(ends)
