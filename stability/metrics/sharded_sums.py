"""Exact sums over ranks, and the norm of sharded tensors that is made of one.

An exact sum is an integer of up to 2,200 bits. Its limbs of 32 bits travel as 64-bit integers, so
that adding them on 2^31 ranks can't overflow: the sums of all parameters are one reduction, 2.9 kB
a parameter, and the same bits come out whatever is on which rank. A norm's sum travels in bins, 33
kB, as its device has added them up: with NCCL they reach the CPU once, in the end.

Leaves out the distances of distributions (`sharded_wasserstein`).
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from stability.metrics.collectives import Collectives, collectives_of
from stability.metrics.exact_sums import (
    ExactSum,
    PairSums,
    add_squares_,
    carry_,
    new_bins,
    sum_of_bins,
)
from stability.metrics.pieces import held_values

__all__ = ["add_pair_sums", "add_sums", "norm_of"]

_LIMBS = 70
"""Of 32 bits: FP64 numbers have 2,098 bits above 2^-1074, and a sum of 2^60 of them 60 more."""
_LANES = _LIMBS + 3
_SUMS = ("b", "abs_error", "a_square", "b_square", "error_square")
_ROOM = 2**30
"""Values after which bins are carried."""
_PART = 2**22
"""Values that are widened at once."""
_TOGETHER = 2**25
"""Values of small tensors that a GPU adds up at once: 128 MB of FP32."""


def norm_of(tensors: Iterable[Tensor], group: Any = None) -> float:
    """Return the L2 norm of all values of `tensors`, sharded over a process group or not.

    The root of the exact sum of squares: the same bits on every rank and under every layout of the
    same values. Every rank of the group passes its tensors; gradients that are `DTensor`s are
    counted once each, plain ones, as DDP has them, on rank 0. Formats of at most 64 bits. NaN
    and infinities give NaN and infinity, and no tensors 0.
    """
    ranks, bins, room = collectives_of(group), None, _ROOM
    for part in _parts(held_values(tensors, group)):
        bins = new_bins(part.device) if bins is None else bins
        room -= part.numel()
        if room < 0:
            carry_(bins)
            room = _ROOM - part.numel()
        add_squares_(bins, part)
    bins = new_bins(torch.device("cpu")) if bins is None else carry_(bins)
    return math.sqrt(float(sum_of_bins(ranks.add(bins).cpu().numpy())))


def _parts(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield flat FP32 or FP64 values, so many at a time; on a GPU those of small tensors together.

    There the start of an operation takes longer than a small tensor's values.
    """
    held: list[Tensor] = []
    for values in tensors:
        is_on_cpu = values.device.type == "cpu"
        for part in map(_wide, values.reshape(-1).split(_PART if is_on_cpu else _TOGETHER)):
            if is_on_cpu:
                yield part
                continue
            like = not held or (part.dtype, part.device) == (held[0].dtype, held[0].device)
            if not like or sum(x.numel() for x in held) + part.numel() > _TOGETHER:
                yield _joined(held)
                held = []
            held.append(part)
    if held:
        yield _joined(held)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _wide(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def add_sums(ranks: Collectives, sums: Sequence[ExactSum]) -> list[ExactSum]:
    """Return the sum over all ranks of each of `sums`, of which every rank has as many."""
    lanes = np.stack([_lanes(each) for each in sums]) if sums else np.zeros((0, _LANES), np.int64)
    return [_sum_of_lanes(row) for row in ranks.add(torch.from_numpy(lanes)).numpy()]


def add_pair_sums(
    ranks: Collectives, sums: Sequence[PairSums], counts: NDArray[np.int64]
) -> tuple[list[PairSums], NDArray[np.int64]]:
    """Return the sums of each tensor over all ranks, and `counts`, a row for each, added up too."""
    whole = [[each.count, each.flips] for each in sums]
    terms = [[_lanes(getattr(each, name)) for name in _SUMS] for each in sums]
    rows = np.concatenate(
        [np.array(whole, np.int64), np.reshape(terms, (len(sums), -1)), counts], 1
    )
    added = ranks.add(torch.from_numpy(rows)).numpy()
    # floats of 0 and above order as their bits do, and a NaN comes last
    gaps = np.array([each.max_abs if each.max_abs == each.max_abs else np.nan for each in sums])
    largest = ranks.largest(torch.from_numpy(gaps.view(np.int64))).numpy().view(np.float64)
    found = []
    for row, gap in zip(added, largest.tolist(), strict=True):
        limbs = row[2 : 2 + len(_SUMS) * _LANES].reshape(len(_SUMS), _LANES)
        named = dict(zip(_SUMS, map(_sum_of_lanes, limbs), strict=True))
        found.append(PairSums(count=int(row[0]), flips=int(row[1]), max_abs=gap, **named))
    return found, added[:, 2 + len(_SUMS) * _LANES :]


def _lanes(total: ExactSum) -> NDArray[np.int64]:
    limbs = np.frombuffer(total.units.to_bytes(4 * _LIMBS, "little", signed=True), "<u4")
    lanes = np.zeros(_LANES, np.int64)
    lanes[:_LIMBS] = limbs
    lanes[_LIMBS - 1] = limbs[-1:].view("<i4")[0]  # the sign is in the last one
    special = total.special
    lanes[_LIMBS:] = (special == math.inf, special == -math.inf, special != special)
    return lanes


def _sum_of_lanes(lanes: NDArray[np.int64]) -> ExactSum:
    units = sum(int(lanes[limb]) << 32 * limb for limb in np.flatnonzero(lanes[:_LIMBS]).tolist())
    above, below, nan = lanes[_LIMBS:].tolist()
    special = (math.inf if above else 0.0) - (math.inf if below else 0.0)
    return ExactSum(units, math.nan if nan else special)
