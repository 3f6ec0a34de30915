"""What ranks tell each other to measure together: sums, maxima, and values that change hands.

Every rank makes the same calls in the same order, with tensors of the same shapes: what is done
next may depend on what a call has returned, never on what one rank alone knows. A rank that finds
an error says so by `agree`, and all of them raise it.

One process is the case of one rank. Leaves out how the ranks are laid out (`pieces`), and what is
measured.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch import distributed as dist

__all__ = ["Collectives", "GroupCollectives", "OneProcess", "agree", "collectives_of"]


class Collectives(Protocol):
    """The ranks that measure together, as one of them sees them."""

    index: int
    """Of this rank, from 0."""
    count: int

    def add(self, integers: Tensor) -> Tensor:
        """Return the sum over all ranks of an int64 tensor of one shape, on its device."""
        ...

    def largest(self, integers: Tensor) -> Tensor:
        """Return the largest of each element over all ranks, as `add` does the sum."""
        ...

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank its share of flat `values`; return what the ranks sent, in their order.

        `sent` and `received` are how many values go to and come from each rank.
        """
        ...


class OneProcess:
    """One process: what it knows is all there is."""

    index, count = 0, 1

    def add(self, integers: Tensor) -> Tensor:
        """Return `integers`."""
        return integers

    def largest(self, integers: Tensor) -> Tensor:
        """Return `integers`."""
        return integers

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Return `values`."""
        return values


class GroupCollectives:
    """The ranks of a process group of torch, which tensors reach on the device it works on."""

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.index, self.count = dist.get_rank(group), dist.get_world_size(group)
        if self.index < 0:
            raise ValueError(
                "collectives_of: this process must be of the group, got one that is not; "
                "measure on its members alone"
            )
        is_nccl = "nccl" in dist.get_backend(group)
        self._device = torch.device("cuda", torch.cuda.current_device()) if is_nccl else "cpu"

    def add(self, integers: Tensor) -> Tensor:
        """Return the sum over the group."""
        return self._reduce(integers, dist.ReduceOp.SUM)

    def largest(self, integers: Tensor) -> Tensor:
        """Return the largest of each element over the group."""
        return self._reduce(integers, dist.ReduceOp.MAX)

    def exchange(self, values: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send each rank of the group its share, by one all-to-all."""
        into = torch.empty(sum(received), dtype=values.dtype, device=self._device)
        given = values.to(self._device)
        dist.all_to_all_single(into, given, list(received), list(sent), group=self.group)
        return into.to(values.device)

    def _reduce(self, integers: Tensor, how: Any) -> Tensor:
        # a copy: the reduction is in place
        reduced = integers.to(self._device, copy=True)
        dist.all_reduce(reduced, how, group=self.group)
        return reduced.to(integers.device)


def collectives_of(group: Any = None) -> Collectives:
    """Return the ranks of a process group, the default one for None; one rank where there is none.

    ValueError in a process that is not in the group.
    """
    return GroupCollectives(group) if dist.is_initialized() else OneProcess()


def agree(ranks: Collectives, error: str | None, description: int) -> None:
    """Raise ValueError on all ranks if one has an error, or if their descriptions differ.

    `error` is what this rank has found wrong, and `description`, below 2^62, a hash of what must be
    the same on all of them.
    """
    failed = 0 if error is None else ranks.count - ranks.index
    said = (error or "").encode()
    mine = torch.tensor([failed, len(said) if error else 0, description, -description])
    first, length, most, least = ranks.largest(mine).tolist()
    if first:
        text = torch.zeros(length, dtype=torch.int64)
        if failed == first:
            text[: len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8).long()
        raise ValueError(bytes(ranks.add(text).tolist()).rstrip(b"\0").decode())
    if most != -least:
        raise ValueError(
            "drift: all ranks must name the same tensors of the same shapes and formats, got "
            "others on some; pass the states of one model on every rank"
        )
