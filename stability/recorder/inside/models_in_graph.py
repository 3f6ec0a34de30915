"""Which parts of autograd's record models made, and which of these a backward pass has reached.

Every node of the record has a number, and those that one call of a model made are a range of them.
Leaves out what the models were given (`training`) and what lies between two of them (`made_of`).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

from torch import Tensor, nn

from .inputs import tensors_in
from .names import unwrapped, without_wrappers
from .start_parts import hash_part

__all__ = ["UNKNOWN", "ModelsInGraph"]

UNKNOWN = -1

_MOST_BEFORE = 4096
"""Calls before the last step that are kept: a graph may live on, as that of a generator's result
while its critic steps."""


class ModelsInGraph:
    """The calls of models, by their places in the record of the thread that trains."""

    def __init__(self) -> None:
        self.runs_backward = False
        """Whether gradients are computed now that go to the weights."""
        self._calls: List[Tuple[int, int, str]] = []
        self.beside: Dict[str, str] = {}
        """A hash of each model that does not train and that gradients went through."""
        self._reached: Set[int] = set()
        self._told: Dict[int, Callable[[int], None]] = {}
        """Who is told of the nodes by which losses enter a call, by where that began."""

    def add(self, begin: int, end: int, maker: str) -> None:
        """Tell what a call made, and its `maker` if what that was given has no hash, else ""."""
        if end > begin:
            insort(self._calls, (begin, end, maker))

    def add_beside(self, model: nn.Module, *, is_start: bool) -> Set[str]:
        """Tell of a model that does not train, when it is called first; return what is unproven."""
        inner = unwrapped(model)
        name = type(inner).__name__
        if not is_start:
            return {f"the same weights of {name}, which was first called after an update"}
        weights = [*inner.named_parameters(), *inner.named_buffers()]
        parts = {without_wrappers(own): hash_part(x) for own, x in weights}
        same = sum(each.rpartition("_")[0] == name or each == name for each in self.beside)
        self.beside[f"{name}_{same + 1}" if same else name] = hash_part(parts)
        return set()

    def made(self, place: int) -> Optional[str]:
        """Return the `maker` of a node, "" of one whose input has a hash; None: no model's."""
        call = self._call_at(place)
        return call[2] if call is not None else None

    def reached_by(self, place: int) -> Optional[int]:
        """Return where the call began that made a node of a loss; None of one outside of models.

        `UNKNOWN` where no call was seen: then nobody knows where the model begins.
        """
        call = self._call_at(place)
        if call is not None:
            self._reached.add(call[0])
            if call[0] in self._told:
                self._told[call[0]](place)
            return call[0]
        return None if self._calls else UNKNOWN

    def tell(self, begin: int, then: Callable[[int], None]) -> None:
        """Call `then` with each node by which a loss enters the call that began here."""
        self._told[begin] = then

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
        self._reached.clear()
        self._told.clear()

    def _call_at(self, place: int) -> Optional[Tuple[int, int, str]]:
        index = bisect_left(self._calls, (place + 1,)) - 1
        is_inside = index >= 0 and place < self._calls[index][1]
        return self._calls[index] if is_inside else None
