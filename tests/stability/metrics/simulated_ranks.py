"""Threads of one process as the ranks, and pieces of tensors at random places, for tests."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from stability.metrics.pieces import Piece

_PATIENCE = 300
"""Seconds after which a rank that waits for the others gives up."""


class ThreadRank:
    """One of several threads that call the same collectives; it fails where their calls differ."""

    def __init__(self, index: int, calls: list, shared: deque, barrier: threading.Barrier) -> None:
        self.index, self.count = index, barrier.parties
        self._calls, self._shared, self._barrier = calls, shared, barrier

    def _all(self, call: tuple, given) -> list:
        self._calls[self.index] = (call, given)
        self._barrier.wait(_PATIENCE)
        found = list(self._calls)
        self._barrier.wait(_PATIENCE)
        assert len({each for each, _ in found}) == 1, [each for each, _ in found]
        return [each for _, each in found]

    def add(self, integers):
        """Return one tensor to all: to be read."""
        assert integers.dtype == torch.int64
        found = self._all(("add", integers.shape), integers)
        if self.index == 0:
            total = found[0].clone()
            for other in found[1:]:
                total += other
            self._shared.append(total)
        self._barrier.wait(_PATIENCE)
        return self._shared[-1]

    def largest(self, integers):
        return torch.stack(self._all(("largest", integers.shape), integers)).amax(0)

    def exchange(self, values, sent, received):
        shares = self._all(("exchange", values.dtype), values.split(list(sent)))
        found = [share[self.index] for share in shares]
        assert [part.numel() for part in found] == list(received)
        return torch.cat(found)


def on_ranks(count: int, work: Callable) -> list:
    """Return what `work(rank)` returns, or raises, on each of so many ranks."""
    calls, shared, barrier = [None] * count, deque(maxlen=1), threading.Barrier(count)

    def one(index: int):
        try:
            return work(ThreadRank(index, calls, shared, barrier))
        except Exception as error:
            if not isinstance(error, ValueError):
                barrier.abort()
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def cut(state: dict, owners: dict, rank: int) -> dict[str, Piece]:
    """Return one rank's pieces: of each tensor the rows that it owns, in the order of `owners`."""
    pieces = {}
    for name, tensor in state.items():
        rows = torch.tensor([row for row, of in owners[name] if of == rank], dtype=torch.int64)
        places = (rows, *(torch.arange(side) for side in tensor.shape[1:]))
        pieces[name] = Piece(values=tensor[rows], places=places, shape=tuple(tensor.shape))
    return pieces
