"""Finds the labels that only the loss sees, outside of the model, once it is back-propagated.

They stand in autograd's own record of the loss, between the loss and what a model returned, so
nothing is wrapped for it, a graph that is compiled is left as it is, and what is evaluated has no
part in it. Whole numbers there are labels. A target in floating point may be made of a model's
results, as a teacher's, and other bits of these would be no other batch: it has a name that says
so. What a loss that is written by hand is given is not kept by autograd, or under many names: that
there is something is told. Leaves out what is done with them (`training`).
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Set, Tuple

import torch
from torch import Tensor

__all__ = ["IN_FLOATING_POINT", "find_targets", "place_in_graph"]

_MOST_NODES = 512
"""Nodes of a loss that are looked at; one has a dozen or two."""
_HELD_AS = ("_saved_target", "_saved_targets")
"""What torch's losses call the target that their backward pass needs."""
_INDICES = ("_saved_index", "_saved_indices", "_saved_mask")
"""How a loss that is written by hand takes the labels' log-probabilities, or leaves tokens out."""
IN_FLOATING_POINT = ", in floating point"
"""Ends the name of such a target."""


def place_in_graph() -> int:
    """Return the number that the next node of autograd's record in this thread gets."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def find_targets(
    loss: Tensor, is_models: Callable[[int], bool]
) -> Tuple[List[Tuple[int, str, Tensor]], Set[str]]:
    """Return the targets of a loss, each with its place and its loss's name, and what is no label.

    `is_models` tells by a node's place whether a model made it: what lies before was given to that.
    """
    found: List[Tuple[int, str, Tensor]] = []
    untold: Set[str] = set()
    todo: List[Any] = [loss.grad_fn] if loss.grad_fn is not None else []
    seen: List[Any] = []
    while todo and len(seen) < _MOST_NODES:
        node = todo.pop()
        place = node._sequence_nr()
        if is_models(place) or any(node is other for other in seen):
            continue
        seen.append(node)
        todo += [other for other, _ in node.next_functions if other is not None]
        name = _name_of(node)
        # asked of the class: of the node it would be unpacked
        held = [each for each in _HELD_AS if hasattr(type(node), each)]
        for target in (getattr(node, each) for each in held):
            # no shard, and not inside torch.func
            if type(target) is Tensor and target.grad_fn is None:
                end = IN_FLOATING_POINT if target.is_floating_point() else ""
                found.append((place, f"target of {name}{end}", target))
            elif type(target) is not Tensor:
                untold.add(f"the target of {name}")
        mask = _mask_of_smoothed(node)
        if mask is not None:
            found.append((place, f"mask of {name}", mask))
        elif not held and _is_given_data(node):
            untold.add(f"what {name} was given beside the model's result")
    return sorted(found, key=lambda each: each[0]), untold


def _mask_of_smoothed(node: Any) -> Optional[Tensor]:
    """Return the mask of samples that label smoothing leaves out, as `F.cross_entropy` has it.

    It fills in the summed log-probabilities of each sample, which no prediction is made of; a mask
    elsewhere may be made with the model. None for any other node.
    """
    mask = getattr(node, "_saved_mask", None) if hasattr(type(node), "_saved_mask") else None
    at = node
    for name in ("Neg", "Sum", "LogSoftmax"):
        parents = [other for other, _ in at.next_functions if other is not None]
        if len(parents) != 1 or _name_of(parents[0]) != name:
            return None
        at = parents[0]
    return mask if type(mask) is Tensor else None


def _is_given_data(node: Any) -> bool:
    """Whether an operator after the model was given a tensor that needs no gradient, or an index.

    A number, as what a loss is divided by, is none.
    """
    if isinstance(node, torch.autograd.function.BackwardCFunction):
        return True
    if any(hasattr(type(node), each) for each in _INDICES):
        return True
    if all(other is not None for other, _ in node.next_functions):
        return False
    if hasattr(type(node), "_saved_other") and hasattr(type(node), "_saved_self"):
        saved = (node._saved_other, node._saved_self)
        if any(isinstance(x, Tensor) and x.dim() == 0 for x in saved):
            return False
    metadata = getattr(node, "_input_metadata", None)  # torch 2.1 has none
    return not metadata or len(metadata[0].shape) > 0


def _name_of(node: Any) -> str:
    name = node.name().rsplit("::", 1)[-1].rstrip("0123456789")
    return name[: -len("Backward")] if name.endswith("Backward") else name
