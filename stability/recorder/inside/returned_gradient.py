"""The gradient of a script's loss at what its model returned, as the script's own backward left it.

Where a script computes the loss from what the model returns, nobody else can compute that loss once
more. Its gradient at the result can be kept: under it, held fixed, the model's gradient can be
taken again by any attention. A hook on the nodes that made the result hears it; nothing is put in
the place of anything. What a node hears is the sum over all uses of what it made, the model's own
among them, so that a loss which is made of two results, one made of the other, can't be looked at,
nor one that is made of what the model did not return. All `backward()` of an update are added up,
also where the script forgets some of them before it steps.

Leaves out where the gradient is taken again (`recorder.instrument`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Set

import torch
from torch import Tensor

from .inputs import tensors_in
from .loss_targets import place_in_graph
from .models_in_graph import ModelsInGraph, may_be_stale

__all__ = ["ReturnedGradient"]

_NOTHING = "no loss's backward() was seen to go through what was returned"
_UNFOUND = "no tensor with a gradient was found in what was returned, {}"
_UNRETURNED = "something that was not returned is a part of the loss"
_WEIGHT = "a weight is by itself a part of the loss"
_WRITTEN = "a result is a view that was written into"
_NESTED = "two results are parts of the loss, one of them made of the other"
_OTHERWISE = (
    "a result got a gradient by a way that was not seen, as through another model or by one that "
    "backward() was given"
)
_HOOKED = "a result has hooks of the model's own, which may change its gradient"
_UNKEPT = "its gradient could not be kept: {}"


class ReturnedGradient:
    """The gradient at the tensors that one call of a model has returned, once it is there."""

    def __init__(
        self,
        models: ModelsInGraph,
        result: Any,
        begin: int,
        loss: Optional[Tensor],
        is_weight: Callable[[Tensor], bool],
        entered: Callable[[ReturnedGradient], None],
    ) -> None:
        """Hear of the gradients of `result`, made by a call that began at the place `begin`.

        `models` tell of what losses are made, `loss` is that in what was returned, if it has one,
        and `is_weight` tells the model's weights. `entered` is called once a loss is made of it.
        """
        self.begin, self._end = begin, place_in_graph()
        self.gradients: Dict[int, Tensor] = {}
        """By the tensor's place among those of the result."""
        self._models, self._is_weight, self._when_entered = models, is_weight, entered
        self._is_dropped = False
        self._kind = type(result).__name__
        self._results: Dict[int, Dict[int, int]] = {}
        """By a node's place and the number of its output: which tensor of the result that is."""
        self._of_loss = -1
        """The place of the node that made the loss, and nothing else."""
        self._hooked: Set[int] = set()
        self._entered: Set[int] = set()
        """The places of the nodes from which losses went into the call."""
        self._is_unreturned = self._has_weight = self._is_unseen = self._is_written = False
        self._error = ""
        nodes: Dict[int, Any] = {}
        for index, (_, x) in enumerate(tensors_in(result, "")):
            if may_be_stale(x):
                self._is_written = True
                continue
            node: Any = x.grad_fn
            if node is None or not begin <= node._sequence_nr() < self._end:
                continue
            place = node._sequence_nr()
            nodes[place] = node
            self._results.setdefault(place, {}).setdefault(x.output_nr, index)
            if x is loss and len(getattr(node, "_input_metadata", " ")) == 1:
                self._of_loss = place
            if x._backward_hooks:
                self._hooked.add(place)
        self._below = _results_below(nodes, begin, self._end)
        for place, node in nodes.items():
            node.register_prehook(self._hearing(place))
        models.tell(begin, self.enters, self.also_of)

    @property
    def is_entered(self) -> bool:
        """Whether a loss that was back-propagated is made of it."""
        return bool(self._entered)

    @property
    def is_of_loss(self) -> bool:
        """Whether losses are made of the loss that the model returned, and of nothing else."""
        is_whole = not (self._has_weight or self._is_unseen)
        return is_whole and self._of_loss >= 0 and self._entered == {self._of_loss}

    @property
    def reaches_loss(self) -> bool:
        """Whether the loss that the model returned is a part of what losses are made of."""
        return self._of_loss in self._entered

    @property
    def lacks(self) -> str:
        """Why the model's gradient can't be taken under this one, a clause; empty if it can."""
        below = {each for place in self._entered for each in self._below.get(place, ())}
        heard = {place for place, at in self._results.items() if self._is_heard(at)}
        reasons = {
            _UNKEPT.format(self._error): bool(self._error),
            _WRITTEN: self._is_written,
            _UNFOUND.format(f"a {self._kind}"): not self._results,
            _NOTHING: not self._entered and not heard,
            _UNRETURNED: self._is_unreturned or not self._entered <= self._results.keys(),
            _WEIGHT: self._has_weight,
            _NESTED: bool(self._entered & below),
            _OTHERWISE: self._is_unseen or bool(heard - self._entered - below),
            _HOOKED: bool(self._entered & self._hooked),
        }
        found = next((why for why, is_so in reasons.items() if is_so), "")
        return found or ("" if heard & self._entered else _NOTHING)

    def enters(self, place: int) -> None:
        """Tell that a loss, which is about to be back-propagated, is made of this node's result."""
        is_first = not self._entered
        self._entered.add(place)
        if is_first:
            self._when_entered(self)

    def also_of(self, leaf: Optional[Tensor]) -> None:
        """Tell what a loss is made of outside of calls: a leaf, or None for what was not seen."""
        self._is_unseen |= leaf is None
        self._has_weight |= leaf is not None and self._is_weight(leaf)

    def drop(self) -> None:
        """Keep nothing, and hear no more."""
        self.gradients.clear()
        self._models.tell_no_more(self.begin)
        self._is_dropped = True

    @property
    def is_dropped(self) -> bool:
        """Whether another call is looked at instead."""
        return self._is_dropped

    @property
    def nbytes(self) -> int:
        """The size of the gradients that are kept."""
        return sum(x.numel() * x.element_size() for x in self.gradients.values())

    def move_to_host(self) -> None:
        """Keep the gradients in the host's memory, where there is room for those of many calls."""
        self.gradients = {index: x.cpu() for index, x in self.gradients.items()}

    def applied_to(self, result: Any) -> Tensor:
        """Return a number whose gradient at `result`, of another such call, is the one kept here.

        ValueError if it can't be, as in `lacks`, or if `result` is of other shapes.
        """
        if self.lacks:
            raise ValueError(self.lacks)
        found = dict(enumerate(x for _, x in tensors_in(result, "")))
        terms: List[Tensor] = []
        for place in sorted(self._entered):
            for index in self._results[place].values():
                gradient = self.gradients.get(index)
                if gradient is None:
                    continue
                x = found.get(index)
                if x is None or x.shape != gradient.shape:
                    raise ValueError("called once more, the model returns tensors of other shapes")
                term = (x * gradient.to(x.device, x.dtype).conj()).sum()
                terms.append(term.real if term.is_complex() else term)
        total = terms[0]
        for term in terms[1:]:
            total = total + term.to(total.device, total.dtype)
        return total

    def _is_heard(self, outputs: Dict[int, int]) -> bool:
        return any(index in self.gradients for index in outputs.values())

    def _hearing(self, place: int) -> Callable[[Any], None]:
        outputs = self._results[place]

        def hear(gradients: Any) -> None:
            # one that goes to no weight, or inside of a call whose loss can be computed once more
            is_needed = place == self._of_loss or not self.is_of_loss
            if self._is_dropped or not self._models.runs_backward or not is_needed:
                return
            try:
                for number, gradient in enumerate(gradients):
                    if gradient is not None:
                        self._add(outputs.get(number), gradient)
            except RuntimeError as error:  # it is in the middle of the script's own backward()
                self._error = str(error).strip().partition("\n")[0]
                self.gradients.clear()

        return hear

    def _add(self, index: Optional[int], gradient: Tensor) -> None:
        if index is None:
            self._is_unreturned = True
            return
        with torch.no_grad():
            known = self.gradients.get(index)
            # a copy: what comes after may write into it
            own = gradient.detach().clone()
            self.gradients[index] = own if known is None else known.to(own.device) + own


def _results_below(nodes: Dict[int, Any], begin: int, end: int) -> Dict[int, Set[int]]:
    """Return which of the `nodes`, by place, each of them is made of, inside the call."""
    above: Dict[int, Set[int]] = {place: set() for place in nodes}
    """Of each node on the way, the results that it is made into."""
    found: Dict[int, Set[int]] = {place: set() for place in nodes}
    waiting: Dict[int, Any] = dict(nodes)
    while waiting:
        # what a node is made of has a smaller number, so that each is done once
        place = max(waiting)
        node = waiting.pop(place)
        made_into = above.pop(place, set())
        for each in made_into:
            if place in nodes:
                found[each].add(place)
        reached = made_into | ({place} if place in nodes else set())
        for other, _ in node.next_functions:
            if other is not None and begin <= other._sequence_nr() < end:
                waiting[other._sequence_nr()] = other
                above.setdefault(other._sequence_nr(), set()).update(reached)
    return found
