"""What an input was made of that stands in autograd's record: data, weights, results of models.

A script may compute with its data before a model is called, on data that need a gradient, as the
points of a differential equation, or between two models. Data alone have a hash, as they are given;
what a model made has none, since other bits of it are no other batch. Of what came in between,
autograd keeps the tensors that need a gradient, and that there are others is told. Leaves out which
nodes models made (`models_in_graph`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Callable, Dict, List, Optional, Set

from torch import Tensor

from .loss_targets import is_given_data, name_of

__all__ = ["MadeOf", "made_of"]

_MOST_NODES = 512
_OF_ITS_OWN = ("Select", "Max", "Min", "Sort", "Topk", "Median", "Mode", "Kthvalue")
"""Operators whose index is a number, or their own result."""


@dataclass
class MadeOf:
    """What a walk through the record has found."""

    leaves: List[Tensor] = field(default_factory=list)
    """What needs a gradient and nobody made: weights among them."""
    makers: Set[str] = field(default_factory=set)
    """Of models, as `models_in_graph` has them."""
    beside: Set[str] = field(default_factory=set)
    """The operators that were given something else."""
    is_whole: bool = True


def made_of(
    x: Tensor,
    maker_of: Callable[[int], Optional[str]],
    is_hooked: Callable[[int], bool] = lambda place: False,
) -> MadeOf:
    """Return what `x` was made of; `maker_of` tells by a node's place which model made it.

    `is_hooked` tells of nodes that must not be read (`saved_hooks`).
    """
    found = MadeOf()
    seen: Dict[int, Any] = {}
    todo: List[Any] = [x.grad_fn] if x.grad_fn is not None else []
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        if len(seen) == _MOST_NODES:
            found.is_whole = False
            break
        seen[id(node)] = node  # kept: another node might get its number
        maker = maker_of(node._sequence_nr())
        if maker is not None:
            found.makers.add(maker)
        elif name_of(node) == "AccumulateGrad":
            found.leaves.append(node.variable)
        else:
            todo += [other for other, _ in node.next_functions if other is not None]
            if is_hooked(node._sequence_nr()) or _is_given_more(node):
                found.beside.add(name_of(node))
    return found


def _is_given_more(node: Any) -> bool:
    """Whether an operator was given data beside what stands in the record."""
    if name_of(node) in _OF_ITS_OWN:
        return False
    try:
        return hasattr(type(node), "_saved_condition") or is_given_data(node)
    except RuntimeError:  # its tensors are gone: gradients went through it before
        return True
