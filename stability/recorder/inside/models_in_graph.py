"""Which parts of autograd's record models made, and which of these a backward pass has reached.

Every node of the record has a number, and those that one call of a model made are a range of them.
Leaves out what the models were given (`training`) and what lies between two of them (`made_of`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, List, Optional, Set, Tuple

from torch import Tensor

from .inputs import tensors_in

__all__ = ["ModelsInGraph"]

_MOST_BEFORE = 4096
"""Calls before the last step that are kept: a graph may live on, as that of a generator's result
while its critic steps."""


class ModelsInGraph:
    """The calls of models, by their places in the record of the thread that trains."""

    def __init__(self) -> None:
        self.runs_backward = False
        """Whether gradients are computed now that go to the weights."""
        self._calls: List[Tuple[int, int, str]] = []
        self._since_step = 0
        self._reached: Set[int] = set()

    def add(self, begin: int, end: int, maker: str) -> None:
        """Tell what a call made, and its `maker` if what that was given has no hash, else ""."""
        if end > begin:
            insort(self._calls, (begin, end, maker))
            self._since_step += 1

    def made(self, place: int) -> Optional[str]:
        """Return the `maker` of a node, "" of one whose input has a hash; None: no model's."""
        call = self._call_at(place)
        return call[2] if call is not None else None

    def ends_loss(self, place: int) -> bool:
        """Whether a node that a loss is made of is no part of it outside of models."""
        call = self._call_at(place)
        if call is not None:
            self._reached.add(call[0])
        # without a call nobody knows where the model begins
        return call is not None or not self._since_step

    def watch(self, begin: int, end: int, result: Any) -> None:
        """Note once gradients go through what a call has returned; its graph stays as it is."""

        def note(_: Any) -> None:
            if self.runs_backward:
                self._reached.add(begin)

        for _, x in tensors_in(result, ""):
            node: Any = x.grad_fn if isinstance(x, Tensor) else None
            if node is not None and begin <= node._sequence_nr() < end:
                node.register_prehook(note)

    def is_reached(self, begin: int) -> bool:
        """Whether a loss was back-propagated through the call that began at this place."""
        return begin in self._reached

    def step(self) -> None:
        """Tell of an optimizer's step: what comes now belongs to the next one."""
        del self._calls[:-_MOST_BEFORE]
        self._since_step = 0
        self._reached.clear()

    def _call_at(self, place: int) -> Optional[Tuple[int, int, str]]:
        index = bisect_left(self._calls, (place + 1,)) - 1
        is_inside = index >= 0 and place < self._calls[index][1]
        return self._calls[index] if is_inside else None
