"""Drift of two states that are sharded over ranks, equal to the bit to that of the whole.

Each rank goes over the pieces it counts (`pieces`), pair by pair; the exact sums of all parameters
are added up in one reduction (`sharded_sums`); W1 of each parameter, and of all of them pooled, by
exchanges of values (`sharded_wasserstein`). Every rank returns the same numbers. The metrics, and
what NaN and infinities do to them, are those of `drift`.

Leaves out how tensors are laid out over ranks (`pieces`).
"""

import hashlib
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stability.metrics.collectives import Collectives, agree, collectives_of
from stability.metrics.drift import ALL, check_names, metrics_of, no_drift, same_bits
from stability.metrics.exact_sums import PairSums, pair_sums
from stability.metrics.pieces import Piece, pieces_of
from stability.metrics.sharded_sums import add_pair_sums
from stability.metrics.sharded_wasserstein import Sample, gap_sums
from stability.metrics.wasserstein import HELD, pool

__all__ = ["drift_of_pieces", "sharded_drift"]

Pieces = Mapping[str, Piece]
_PART = 2**22
"""Pairs that are widened at once."""


def sharded_drift(
    state_a: Mapping[str, Tensor],
    state_b: Mapping[str, Tensor],
    *,
    group: Any = None,
    held: int = HELD,
) -> dict[str, dict[str, float]]:
    """Return the metrics of `drift` for two states over a process group, the default one for None.

    Every rank passes its own states: DTensors, or plain tensors, of which rank 0 counts all. Each
    is sent at most `held` values at once. ValueError on every rank where `drift` raises one, where
    ranks name other tensors, or where a tensor is laid out otherwise in a than in b.
    """
    pieces = (pieces_of(state, group) for state in (state_a, state_b))
    return drift_of_pieces(*pieces, ranks=collectives_of(group), held=held)


def drift_of_pieces(
    pieces_a: Pieces, pieces_b: Pieces, *, ranks: Collectives, held: int = HELD
) -> dict[str, dict[str, float]]:
    """Return the metrics of `drift` for two states of which each of `ranks` has pieces.

    Pieces are asked for one pair at a time, several times: a mapping that loads what it is asked
    for may be larger than the memory. Else as `sharded_drift`.
    """
    agree(ranks, *_described(pieces_a, pieces_b))
    sums, counts = _pair_sums(pieces_a, pieces_b, ranks)
    names = list(pieces_b)
    tensors = {
        name: _Tensor(name, found, _Special.of(row))
        for name, found, row in zip(names, sums, counts.tolist(), strict=True)
    }
    if not any(tensor.special.differs for tensor in tensors.values()):
        return {name: no_drift() for name in (ALL, *names)}
    return _with_w1(tensors, pieces_a, pieces_b, ranks, held)


@dataclass(frozen=True, slots=True)
class _Special:
    """What is special about two tensors' values, over all ranks."""

    differs: int
    """Collectives on which the two pieces are not the same bits."""
    in_a: tuple[int, ...]
    """Values that are NaN, -inf and +inf."""
    in_b: tuple[int, ...]

    @classmethod
    def of(cls, row: list[int]) -> "_Special":
        return cls(row[0], tuple(row[1:4]), tuple(row[4:]))

    @property
    def w1(self) -> float | None:
        """What the values that are not finite make of W1; None if that takes the others."""
        if self.in_a[0] or self.in_b[0]:
            return math.nan
        # infinities of one sign are partners at no distance, but only in equal numbers
        return None if self.in_a == self.in_b else math.inf


@dataclass(frozen=True, slots=True)
class _Tensor:
    name: str
    sums: PairSums
    special: _Special


def _described(pieces_a: Pieces, pieces_b: Pieces) -> tuple[str | None, int]:
    """Return what is wrong with this rank's pieces, and a hash of what all must have alike."""
    try:
        check_names(pieces_a, pieces_b)
        described = [_checked(name, pieces_a[name], pieces_b[name]) for name in pieces_b]
    except ValueError as error:
        return str(error), 0
    digest = hashlib.sha256(repr(described).encode()).digest()
    return None, int.from_bytes(digest[:7], "little")


def _checked(name: str, a: Piece, b: Piece) -> tuple:
    if a.shape != b.shape or math.prod(b.shape) == 0:
        raise ValueError(
            "drift: each parameter must have one shape in both states and hold values, got "
            f"{name} {a.shape} and {b.shape}; compare runs of one model"
        )
    formats = (a.values.dtype, b.values.dtype)
    if not all(format.is_floating_point for format in formats):
        raise ValueError(
            f"drift: {name} must be floating-point, got {formats[0]} and {formats[1]}; "
            "leave counters and masks out"
        )
    if not all(map(torch.equal, a.places, b.places)):
        held = [tuple(map(len, piece.places)) for piece in (a, b)]
        raise ValueError(
            f"drift: {name} must be laid out alike in both states, got {held[0]} and {held[1]} of "
            f"{b.shape} on one rank; redistribute a: a.redistribute(b.device_mesh, b.placements)"
        )
    return name, b.shape, *map(str, formats)


def _pair_sums(
    pieces_a: Pieces, pieces_b: Pieces, ranks: Collectives
) -> tuple[list[PairSums], np.ndarray]:
    """Return the sums of each tensor over all ranks, and what is special about its values."""
    sums, counts = [], np.zeros((len(pieces_b), 7), np.int64)
    for row, name in zip(counts, pieces_b, strict=True):
        total = PairSums()
        a, b = pieces_a[name].values.detach(), pieces_b[name].values.detach()
        row[0] = not same_bits(a, b)
        for first, second in zip(_parts(a), _parts(b), strict=True):
            wide = pool([first.to(b.device)]), pool([second])
            total += pair_sums(*wide)
            row[1:4] += _non_finite(wide[0])
            row[4:] += _non_finite(wide[1])
        sums.append(total)
        del a, b  # before the next pair is loaded
    return add_pair_sums(ranks, sums, counts)


def _parts(values: Tensor) -> Iterator[Tensor]:
    return (part for part in values.reshape(-1).split(_PART) if part.numel())


def _non_finite(values: Tensor) -> tuple[int, int, int]:
    # a sum that is finite has no other terms, and takes an eighth of the time of a look at each
    if bool(torch.isfinite(values.sum())):
        return 0, 0, 0
    found = (values.isnan(), values == -math.inf, values == math.inf)
    nan, below, above = (int(each.sum()) for each in found)
    return nan, below, above


def _with_w1(
    tensors: dict[str, _Tensor], pieces_a: Pieces, pieces_b: Pieces, ranks: Collectives, held: int
) -> dict[str, dict[str, float]]:
    total = sum((tensor.sums for tensor in tensors.values()), PairSums())
    rows = [[t.special.differs, *t.special.in_a, *t.special.in_b] for t in tensors.values()]
    pooled = _Tensor(ALL, total, _Special.of(np.sum(rows, 0).tolist()))
    names = {ALL: list(tensors), **{name: [name] for name in tensors}}
    everything = {ALL: pooled, **tensors}
    # equal bits have no W1, whatever they are
    known = {name: t.special.w1 for name, t in everything.items() if t.special.differs}
    w1 = {name: value for name, value in known.items() if value is not None}
    # one exchange for all parameters, and one for them pooled
    for chosen in ([ALL], list(tensors)):
        open_ones = [name for name in chosen if name in known and name not in w1]
        samples = [_sample(everything[n], names[n], pieces_a, pieces_b) for n in open_ones]
        for name, found in zip(open_ones, gap_sums(samples, ranks, held), strict=True):
            w1[name] = found.mean(everything[name].sums.count)
    return {
        name: metrics_of(tensor.sums, w1[name]) if tensor.special.differs else no_drift()
        for name, tensor in everything.items()
    }


def _sample(tensor: _Tensor, names: list[str], pieces_a: Pieces, pieces_b: Pieces) -> Sample:
    sides = [_Values(pieces, names) for pieces in (pieces_a, pieces_b)]
    formats = [frozenset(part.dtype for part in side) for side in sides]
    finite = tensor.sums.count - sum(tensor.special.in_b)
    return Sample(parts=(sides[0], sides[1]), formats=(formats[0], formats[1]), count=finite)


class _Values(Collection[Tensor]):
    """The values of some pieces, each loaded when it is reached."""

    def __init__(self, pieces: Pieces, names: list[str]) -> None:
        self._pieces, self._names = pieces, names

    def __len__(self) -> int:
        return len(self._names)

    def __iter__(self) -> Iterator[Tensor]:
        return (self._pieces[name].values for name in self._names)

    def __contains__(self, tensor: object) -> bool:
        return any(tensor is each for each in self)
