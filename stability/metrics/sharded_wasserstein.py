"""W1 of values that are spread over ranks: exact, in one exchange where they fit, else in rounds.

How. The line of keys (a float's bits, as an integer that orders as the values do) is cut where an
added-up histogram says, into one segment for each rank; each rank is sent the values of its
segment, both sides', by an all-to-all, sorts them, and adds up what the segment has of the sum of
|x - y| by rank (`merged_gap_sum`), given how many more values one side has below: the histogram
knows. All parameters lie on one line, one behind the other, so that hundreds of them are one
exchange; all weights pooled are another. If a segment for each rank would be more than `held`
values there are more segments, which go in rounds.

A value there too often for one rank is counted, not sent. Formats of 16 bits are counted on their
65,536 patterns, and nothing is sent but counts.

What a rank holds: its own pieces; at most `held` values that it is sent; of its own values those
that it sends in a round, its even share of `held` if pieces are even; some 50 MiB of histograms.

Leaves out NaN and infinities, which the caller has counted, and the rest of drift
(`sharded_drift`).
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import torch
from torch import Tensor

from stability.metrics.collectives import Collectives
from stability.metrics.exact_sums import ExactSum, merged_gap_sum
from stability.metrics.sharded_sums import add_sums
from stability.metrics.wasserstein import (
    count_codes,
    counted_gap_sum,
    group_bins,
    sort_values_,
)

__all__ = ["Sample", "gap_sums"]

_AT_ONCE = 16
"""Histograms added up at once, 1 MiB each."""
_DIGIT = 16
_BINS = 2**_DIGIT
_FEW = 2**15
"""Values a side up to which sending those of 16 bits takes fewer bytes than counting them."""
_CHUNK = {"cpu": 2**18, "cuda": 2**24}
"""Values widened and sorted at once; on a CPU they stay in its cache."""
_INTEGERS = {torch.float32: torch.int32, torch.float64: torch.int64}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """Two samples of equally many values, a and b, and what of them this rank counts."""

    parts: tuple[Collection[Tensor], Collection[Tensor]]
    """This rank's values, by side; walked through several times, one tensor at a time."""
    formats: tuple[frozenset[torch.dtype], frozenset[torch.dtype]]
    """Of the parts of all ranks, by side."""
    count: int
    """Finite values on all ranks, of either side."""


@dataclass(frozen=True, slots=True)
class _Slice:
    """The values of a sample whose keys are from `low` to below `high`, and how many they are."""

    sample: int
    low: int
    high: int
    counts: tuple[int, int]
    surplus: int = 0
    """How many more values a has below."""
    single: bool = False
    """All are of the key `low`, and too many to be sent."""


def gap_sums(samples: Sequence[Sample], ranks: Collectives, held: int) -> list[ExactSum]:
    """Return, on all ranks, the sum of |x - y| over a's and b's pairs by rank, of each sample.

    Every rank of `ranks` passes the same samples, with its own parts. Each is sent at most `held`
    values at once.
    """
    found = [ExactSum()] * len(samples)
    counted = [at for at, sample in enumerate(samples) if _is_counted(sample)]
    for batch in _batches(counted):
        _add_counted(samples, batch, ranks, found)
    for wide in _INTEGERS:
        chosen = [at for at in range(len(samples)) if _width(samples[at]) == wide]
        ranged = [at for at in chosen if at not in set(counted)]
        sums = _by_ranges([samples[at] for at in ranged], ranks, held, wide)
        for at, total in zip(ranged, sums, strict=True):
            found[at] = total
    # each rank has what its segments add
    return add_sums(ranks, found)


def _is_counted(sample: Sample) -> bool:
    narrow = all(len(side) == 1 and next(iter(side)).itemsize <= 2 for side in sample.formats)
    return narrow and sample.count > _FEW


def _width(sample: Sample) -> torch.dtype:
    is_wide = torch.float64 in sample.formats[0] | sample.formats[1]
    return torch.float64 if is_wide else torch.float32


def _batches(items: Sequence) -> Iterator[Sequence]:
    for start in range(0, len(items), _AT_ONCE):
        yield items[start : start + _AT_ONCE]


def _add_counted(
    samples: Sequence[Sample], batch: Sequence[int], ranks: Collectives, found: list[ExactSum]
) -> None:
    counts = torch.zeros(len(batch), 2, _BINS, dtype=torch.int64)
    for at, into in zip(batch, counts, strict=True):
        for side in (0, 1):
            for codes in count_codes(samples[at].parts[side]).values():
                into[side, : len(codes)] += torch.from_numpy(codes)
    whole = ranks.add(counts).numpy()
    for place, at in enumerate(batch):
        if place % ranks.count == ranks.index:
            formats = (next(iter(side)) for side in samples[at].formats)
            sides = zip(formats, whole[place], strict=True)
            first, second = ({format: codes} for format, codes in sides)
            found[at] = counted_gap_sum(first, second)


def _by_ranges(
    samples: Sequence[Sample], ranks: Collectives, held: int, wide: torch.dtype
) -> list[ExactSum]:
    """Return what this rank's segments add to the sum of each sample."""
    found = [ExactSum()] * len(samples)
    total = sum(2 * sample.count for sample in samples)
    # segments are at most half as long again as they are on average: so far a cell reaches over
    grain = max(1, total // (2 * ranks.count * _rounds(total, ranks, held)))
    slices = _with_surplus(_cells(samples, ranks, grain, wide))
    for one in slices if ranks.index == 0 else ():
        if one.single:
            after = one.surplus + one.counts[0] - one.counts[1]
            value = float(_values([one.low], wide)[0])
            found[one.sample] += ExactSum.of(value, abs(one.surplus) - abs(after))
    for segments in _segments(slices, ranks, held):
        sides = _exchange(samples, segments, ranks, wide)
        for mine, (a, b) in zip(segments[ranks.index], sides, strict=True):
            found[mine.sample] += merged_gap_sum(a, b, mine.surplus)
    return found


def _rounds(total: int, ranks: Collectives, held: int) -> int:
    return max(1, -(-3 * total // (2 * ranks.count * held)))


def _cells(
    samples: Sequence[Sample], ranks: Collectives, grain: int, wide: torch.dtype
) -> list[_Slice]:
    """Return, in order, slices of at most `grain` values that hold all finite ones of all samples.

    A sample of no more is one slice. Others are cut by the leading 16 bits of their keys, and
    where those are not enough by the next 16.
    """
    low, high = _keys(torch.tensor([torch.finfo(wide).min, torch.inf], dtype=wide)).tolist()
    bits = 8 * wide.itemsize
    cells, regions = [], []
    for at, sample in enumerate(samples):
        if 2 * sample.count > grain:
            regions.append((at, -(1 << (bits - 1))))
        elif sample.count:
            cells.append(_Slice(at, low, high, (sample.count, sample.count)))
    for shift in range(bits - _DIGIT, -1, -_DIGIT):
        crowded = []
        for batch in _batches(regions):
            counts = ranks.add(_histograms(samples, batch, shift, wide)).numpy()
            for (at, base), sides in zip(batch, counts, strict=True):
                for cell in _group(at, base, sides, shift, grain):
                    is_crowded = sum(cell.counts) > grain and not cell.single
                    (crowded if is_crowded else cells).append(cell)
        regions = [(cell.sample, cell.low) for cell in crowded]
    return sorted(cells, key=lambda cell: (cell.sample, cell.low))


def _group(at: int, base: int, counts: np.ndarray, shift: int, grain: int) -> Iterator[_Slice]:
    filled = np.flatnonzero(counts.sum(0))
    for group in group_bins(counts[:, filled].sum(0), grain):
        start, stop = int(filled[group[0]]), int(filled[group[-1]]) + 1
        in_a, in_b = counts[:, start:stop].sum(1).tolist()
        low, high = (base + (bin << shift) for bin in (start, stop))
        yield _Slice(at, low, high, (in_a, in_b), 0, shift == 0 and in_a + in_b > grain)


def _with_surplus(cells: Sequence[_Slice]) -> list[_Slice]:
    """Return the cells with the surplus below each."""
    slices, sample, surplus = [], -1, 0
    for cell in cells:
        surplus = surplus if cell.sample == sample else 0
        sample = cell.sample
        slices.append(_Slice(sample, cell.low, cell.high, cell.counts, surplus, cell.single))
        surplus += cell.counts[0] - cell.counts[1]
    return slices


def _segments(
    slices: Sequence[_Slice], ranks: Collectives, held: int
) -> Iterator[list[list[_Slice]]]:
    """Yield, round by round, the slices of each rank; neighbours of one sample are joined."""
    total = sum(sum(cell.counts) for cell in slices if not cell.single)
    rounds = _rounds(total, ranks, held)
    parts: list[list[_Slice]] = [[] for _ in range(rounds * ranks.count)]
    before, last = 0, None
    for cell in slices:
        if cell.single:
            last = None
            continue
        part = parts[before * len(parts) // total]
        before += sum(cell.counts)
        if part and last and last is part[-1] and last.sample == cell.sample:
            cell = _joined(part.pop(), cell)
        part.append(cell)
        last = cell
    for start in range(0, len(parts), ranks.count):
        yield parts[start : start + ranks.count]


def _joined(one: _Slice, following: _Slice) -> _Slice:
    counts = (one.counts[0] + following.counts[0], one.counts[1] + following.counts[1])
    return _Slice(one.sample, one.low, following.high, counts, one.surplus)


Sides = tuple[Tensor, Tensor]


def _exchange(
    samples: Sequence[Sample],
    segments: Sequence[Sequence[_Slice]],
    ranks: Collectives,
    wide: torch.dtype,
) -> list[Sides]:
    """Return the sorted values of all ranks in each of this rank's slices, by side."""
    chosen = _choose(samples, list(chain.from_iterable(segments)), wide)
    sizes = torch.tensor([[part.numel() for part in parts] for parts in chosen]).reshape(-1)
    ends = np.cumsum([0, *(2 * len(slices) for slices in segments)]).tolist()
    sent = [int(sizes[start:end].sum()) for start, end in pairwise(ends)]
    mine = segments[ranks.index]
    told = ranks.exchange(
        sizes.long(), [2 * len(slices) for slices in segments], [2 * len(mine)] * ranks.count
    ).reshape(ranks.count, -1)
    values = torch.cat([part for parts in chosen for part in parts] or [torch.empty(0, dtype=wide)])
    del chosen  # as much as is sent
    values = ranks.exchange(values, sent, told.sum(1).tolist())
    # in the order of source, slice, and side
    parts = values.split(told.reshape(-1).tolist())
    found = []
    for place, each in enumerate(mine):
        sides = (torch.cat(parts[2 * place + side :: 2 * len(mine)]) for side in (0, 1))
        a, b = map(sort_values_, sides)
        assert (a.numel(), b.numel()) == each.counts, "the parts hold other values than before"
        found.append((a, b))
    return found


def _choose(
    samples: Sequence[Sample], slices: Sequence[_Slice], wide: torch.dtype
) -> list[list[Tensor]]:
    """Return this rank's values in each slice, of a and then of b, of any order."""
    found: list[list[list[Tensor]]] = [[[], []] for _ in slices]
    for at in sorted({each.sample for each in slices}):
        places = [place for place, each in enumerate(slices) if each.sample == at]
        keys = [key for place in places for key in (slices[place].low, slices[place].high)]
        bounds = _values(keys, wide)
        for side in (0, 1):
            for values in _sorted_chunks(samples[at].parts[side], bounds):
                cuts = torch.searchsorted(values, bounds.to(values.device)).tolist()
                for place, start, end in zip(places, cuts[::2], cuts[1::2], strict=True):
                    if end > start:
                        found[place][side].append(values[start:end])
    empty = torch.empty(0, dtype=wide, device=_device(samples))
    return [[torch.cat(side) if side else empty for side in sides] for sides in found]


def _sorted_chunks(parts: Collection[Tensor], bounds: Tensor) -> Iterator[Tensor]:
    """Yield the values from the first to below the last bound, sorted within each chunk."""
    low, high = bounds[0].item(), bounds[-1].item()
    for values in _chunks(parts, bounds.dtype):
        chosen = _between(values, low, high)
        if chosen.numel():
            yield sort_values_(chosen)


def _between(values: Tensor, low: float, high: float) -> Tensor:
    """Return a copy of the values from `low` to below `high`, +0 for -0."""
    if values.device.type != "cpu":
        return values[(values >= low) & (values < high)] + 0.0
    from stability.metrics.selection_loop import select  # heavy: numba

    chosen = torch.empty(values.numel() + 1, dtype=values.dtype)
    return chosen[: select(values.numpy(), low, high, chosen.numpy())].clone()


def _chunks(parts: Collection[Tensor], wide: torch.dtype) -> Iterator[Tensor]:
    for tensor in parts:
        for part in tensor.detach().reshape(-1).split(_CHUNK.get(tensor.device.type, 2**18)):
            yield part.to(wide)
        del tensor  # before the next one is loaded


def _device(samples: Sequence[Sample]) -> torch.device:
    parts = chain.from_iterable(side for sample in samples for side in sample.parts)
    return next((tensor.device for tensor in parts), torch.device("cpu"))


def _histograms(
    samples: Sequence[Sample], regions: Sequence[tuple[int, int]], shift: int, wide: torch.dtype
) -> Tensor:
    """Return (regions, 2, 65536) counts: of a sample's values whose keys begin as the region does.

    A region is a sample and its least key, and its bins are 2^shift keys wide.
    """
    counts = torch.zeros(len(regions), 2, _BINS, dtype=torch.int64)
    limits = torch.finfo(wide).min, torch.inf
    for at in sorted({at for at, _ in regions}):
        mine = [(place, base) for place, (of, base) in enumerate(regions) if of == at]
        for side in (0, 1):
            for values in _chunks(samples[at].parts[side], wide):
                # +0 for -0: one value, which as bits would have two keys
                keys = _keys(_between(values, *limits)) >> shift
                for place, base in mine:
                    digits = keys - (base >> shift)
                    if shift + _DIGIT < 8 * wide.itemsize:
                        digits = digits[(digits >= 0) & (digits < _BINS)]
                    counts[place, side] += torch.bincount(digits, minlength=_BINS).cpu()
    return counts


def _keys(values: Tensor) -> Tensor:
    """Return signed integers in the order of the values, turning negative ones but for the sign."""
    word = values.view(_INTEGERS[values.dtype])
    return word ^ ((word >> (8 * word.itemsize - 1)) & torch.iinfo(word.dtype).max)


def _values(keys: Sequence[int], wide: torch.dtype) -> Tensor:
    """Return the values with these keys; those beyond the finite ones are infinite."""
    low, high = _keys(torch.tensor([-torch.inf, torch.inf], dtype=wide)).tolist()
    words = torch.tensor([min(max(key, low), high) for key in keys], dtype=_INTEGERS[wide])
    # turning is its own inverse
    return _keys(words.view(wide)).view(wide)
