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

__all__ = ["UNKNOWN", "ModelsInGraph", "may_be_stale"]

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
        self._told: Dict[int, Tuple[Callable[[int], None], Callable[[Optional[Tensor]], None]]] = {}
        """Who is told of the nodes by which losses enter a call, and of what else these are made,
        by where the call began."""

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
                self._told[call[0]][0](place)
            return call[0]
        return None if self._calls else UNKNOWN

    def tell(
        self,
        begin: int,
        enters: Callable[[int], None],
        also_of: Callable[[Optional[Tensor]], None],
    ) -> None:
        """Call `enters` with each node by which a loss enters the call that began here.

        And `also_of` with each leaf that any loss is made of outside of calls, and with None where
        not all of a loss was looked at.
        """
        self._told[begin] = enters, also_of

    def tell_no_more(self, begin: int) -> None:
        """Tell nobody any more of the call that began here."""
        self._told.pop(begin, None)

    def also_of(self, leaf: Optional[Tensor]) -> None:
        """Tell of a leaf that a loss is made of outside of calls; None for what was not seen."""
        for _, then in list(self._told.values()):
            then(leaf)

    def watch(self, begin: int, end: int, result: Any) -> None:
        """Note once gradients go through what a call has returned; its graph stays as it is."""

        def note(_: Any) -> None:
            if self.runs_backward:
                self._reached.add(begin)

        for _, x in tensors_in(result, ""):
            node: Any = None if may_be_stale(x) else x.grad_fn
            if node is not None and begin <= node._sequence_nr() < end:
                node.register_prehook(note)

    def is_reached(self, begin: int) -> bool:
        """Whether a loss was back-propagated through the call that began at this place."""
        return begin in self._reached

    def step(self) -> None:
        """Tell of an optimizer's step: what comes now belongs to the next one."""
        del self._calls[:-_MOST_BEFORE]
        self._reached.clear()

    def _call_at(self, place: int) -> Optional[Tuple[int, int, str]]:
        index = bisect_left(self._calls, (place + 1,)) - 1
        is_inside = index >= 0 and place < self._calls[index][1]
        return self._calls[index] if is_inside else None


def may_be_stale(x: Tensor) -> bool:
    """Whether to ask a tensor for its node may make a new one, sooner than the script would.

    So it is for a view whose memory was written into since. A node's number says when the engine
    runs it, and in another order gradients add up to other bits.
    """
    return x._is_view() and x._version > 0
