"""Finds the labels that only the loss sees, outside of the model, once it is back-propagated.

They stand in autograd's own record of the loss, between the loss and what a model returned, so
nothing is wrapped for it, a graph that is compiled is left as it is, and what is evaluated has no
part in it. Whole numbers there are labels. A target in floating point may be made of a model's
results, as a teacher's, and other bits of these would be no other batch: it has a name that says
so. What a loss that is written by hand is given is not kept by autograd, or under many names: that
there is something is told. Leaves out what is done with them (`training`).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import torch
from torch import Tensor

from .scaled_loss import is_linear, is_scaler_node

__all__ = [
    "AS_NUMBERS",
    "IN_FLOATING_POINT",
    "Aim",
    "find_targets",
    "is_given_data",
    "name_of",
    "place_in_graph",
]

CallOf = Callable[[int], Optional[int]]

_MOST_BEHIND = 512
"""Nodes that are looked at for the call that a label belongs to."""
_MOST_NODES = 20_000
"""Nodes of a loss that are looked at; one has a dozen or two, a sum over many steps some each."""
_HELD_AS = ("_saved_target", "_saved_targets")
"""What torch's losses call the target that their backward pass needs."""
_WEIGHTS = ("weight", "pos_weight")
"""What they call the weights of samples or classes, which need no gradient there."""
_OPERANDS = """self other input output result buffer tensor tensor1 tensor2 mat mat1 mat2 vec vec1
vec2 batch1 batch2 x1 x2 log_probs weight bias total_weight neg_log_likelihood exponent min max end
query key value logsumexp philox_seed philox_offset rng_state running_mean running_var save_mean
save_var save_invstd grad_output"""
_SAVED = "_raw_saved_"
_IS_OPERAND = frozenset(_OPERANDS.split())
"""What torch calls a saved tensor that may need a gradient, or that an operator has made: that one
of these is given is seen at a missing edge. Any other one, as an index or a condition, was given.
"""
IN_FLOATING_POINT = ", in floating point"
"""Ends the name of such a target."""
AS_NUMBERS = ", numbers of the script"
"""Ends the name of what is no tensor: a label, as in `p[row, label]`, or code's own, as `-1`."""
_INDICES = {
    "AsStrided": ("size", "stride", "storage_offset"),
    "ConstantPadNd": ("pad",),
    "Diagonal": ("offset",),
    "Roll": ("shifts",),
    "Select": ("index",),
    "Slice": ("start", "end", "step"),
    "Split": ("split_size",),
    "SplitWithSizes": ("split_sizes",),
    "Unbind": (),
    "Unfold": ("size", "step"),
}
"""Operators that take a part of a result or move it, and what torch calls the numbers that say
which. Of those with several results it matters, too, which of them was taken."""


class Aim(NamedTuple):
    """What only a loss was given."""

    place: int
    name: str
    value: Tensor
    is_shared: bool = False
    """Whether it is the same for each sample, as a number or the weights of classes."""
    call: int = -1
    """Where the last call began of a model that its operator's input is made of."""


def place_in_graph() -> int:
    """Return the number that the next node of autograd's record in this thread gets."""
    return torch.autograd._get_sequence_nr()  # pyright: ignore[reportPrivateImportUsage]


def find_targets(
    loss: Tensor,
    call_of: CallOf,
    is_hooked: Callable[[int], bool] = lambda place: False,
    also_of: Callable[[Optional[Tensor]], None] = lambda leaf: None,
) -> Tuple[List[Aim], Set[str]]:
    """Return the targets of a loss, each with its place and its loss's name, and what is no label.

    `call_of` tells by a node's place in which call a model made it, None of others: what lies
    before was given to that. `is_hooked` tells of nodes that must not be read (`saved_hooks`).
    `also_of` is called with each leaf outside of calls, and with None where not all was looked at.
    """
    found: List[Aim] = []
    untold: Set[str] = set()
    indices: List[Tuple[int, List[int]]] = []
    nodes: Dict[int, Any] = {}
    for node, is_in_sum in _nodes_of(loss, call_of, untold, also_of):
        place, name = node._sequence_nr(), name_of(node)
        if hasattr(node, "variable"):
            also_of(node.variable)
        nodes[place] = node
        if is_hooked(place):
            untold.add(f"what {name} was given, under hooks for saved tensors")
            continue
        try:
            _look_at(node, is_in_sum, found, untold)
        except RuntimeError:  # its tensors are gone: gradients went through it before
            untold.add(f"what {name} was given, which is gone")
        if numbers := _indices_of(node, name):
            indices.append((place, numbers))
    if indices:
        indices.sort()
        value = torch.tensor([number for _, numbers in indices for number in numbers])
        found.append(Aim(indices[0][0], f"indices{AS_NUMBERS}", value, is_shared=True))
    found = [aim._replace(call=_call_behind(nodes[aim.place], call_of)) for aim in found]
    return sorted(found, key=lambda each: each.place), untold


def _call_behind(node: Any, call_of: CallOf) -> int:
    """Return where the last call began that a node's input is made of; -1 if none is near."""
    todo, seen, last = [node], {}, -1
    while todo and len(seen) < _MOST_BEHIND:
        at = todo.pop()
        seen[id(at)] = at
        for other, _ in at.next_functions:
            if other is None or id(other) in seen:
                continue
            call = call_of(other._sequence_nr())
            if call is None:
                todo.append(other)
            else:
                last = max(last, call)
    return last


def _look_at(node: Any, is_in_sum: bool, found: List[Aim], untold: Set[str]) -> None:
    """Add what one operator of a loss was given beside the model's result."""
    place, name = node._sequence_nr(), name_of(node)
    # asked of the class: of the node it would be unpacked
    held = [each for each in _HELD_AS if hasattr(type(node), each)]
    if held:
        _take_held(node, held, found, untold)
    number = _number_given(node)
    mask = _mask_of_smoothed(node)
    if mask is not None:
        found.append(Aim(place, f"mask of {name}", mask))
    elif number is not None:
        named = f"number given to {name}{IN_FLOATING_POINT}"  # one that is counted differs, too
        found.append(Aim(place, named, number, is_shared=True))
    elif is_given_data(node, is_in_sum, bool(held)):
        untold.add(f"what {name} was given beside the model's result")


def _nodes_of(
    loss: Tensor,
    call_of: CallOf,
    untold: Set[str],
    also_of: Callable[[Optional[Tensor]], None],
) -> Iterable[Tuple[Any, bool]]:
    """Return the nodes between a loss and the models, and whether it is linear in each."""
    todo: List[Tuple[Any, bool]] = [(loss.grad_fn, True)] if loss.grad_fn is not None else []
    seen: Dict[int, Tuple[Any, bool]] = {}  # with the node, whose id is its own while it is held
    while todo:
        node, is_in_sum = todo.pop()
        known = seen.get(id(node))
        if call_of(node._sequence_nr()) is not None or (known and (is_in_sum or not known[1])):
            continue
        if len(seen) >= _MOST_NODES:
            untold.add(f"what a loss of more than {_MOST_NODES} operators was given")
            also_of(None)
            break
        seen[id(node)] = node, is_in_sum
        is_in_sum = is_in_sum and is_linear(node)
        todo += [(other, is_in_sum) for other, _ in node.next_functions if other is not None]
    return seen.values()


def _indices_of(node: Any, name: str) -> List[int]:
    """Return the numbers of Python's by which an operator has taken a part, or its input's part."""
    found: List[int] = []
    for each in _INDICES.get(name, ()):
        value = getattr(node, f"_saved_{each}", ())
        numbers = value if isinstance(value, (list, tuple)) else [value]
        # torch hands out one below 0 as if it had no sign
        found += [(int(x) + 2**63) % 2**64 - 2**63 for x in numbers]
    for other, which in node.next_functions:
        if other is not None and name_of(other) in ("Split", "SplitWithSizes", "Unbind"):
            found.append(which)
    return found


def _take_held(node: Any, held: List[str], found: List[Aim], untold: Set[str]) -> None:
    """Add the target that one of torch's losses keeps, and the weights of samples or classes."""
    place, name = node._sequence_nr(), name_of(node)
    target: Any = None
    for target in (getattr(node, each) for each in held):
        # no shard, and not inside torch.func
        if type(target) is Tensor and target.grad_fn is None:
            end = IN_FLOATING_POINT if target.is_floating_point() else ""
            found.append(Aim(place, f"target of {name}{end}", target))
        elif type(target) is not Tensor:
            untold.add(f"the target of {name}")
    for each in _WEIGHTS:
        weight = getattr(node, f"_saved_{each}") if hasattr(type(node), _SAVED + each) else None
        if weight is None:
            continue
        if type(weight) is not Tensor or weight.grad_fn is not None:
            untold.add(f"the {each} of {name}")
            continue
        # one for each sample has the target's rows; elsewhere than here they are of classes
        is_rows = name.startswith("BinaryCrossEntropy") and type(target) is Tensor
        is_rows = is_rows and weight.dim() == target.dim() and weight.shape[0] == target.shape[0]
        found.append(Aim(place, f"{each} of {name}{IN_FLOATING_POINT}", weight, not is_rows))


def _mask_of_smoothed(node: Any) -> Optional[Tensor]:
    """Return the mask of samples that label smoothing leaves out, as `F.cross_entropy` has it.

    It fills in the summed log-probabilities of each sample, which no prediction is made of; a mask
    elsewhere may be made with the model. None for any other node.
    """
    mask = getattr(node, "_saved_mask", None) if hasattr(type(node), "_saved_mask") else None
    at = node
    for name in ("Neg", "Sum", "LogSoftmax"):
        parents = [other for other, _ in at.next_functions if other is not None]
        if len(parents) != 1 or name_of(parents[0]) != name:
            return None
        at = parents[0]
    return mask if type(mask) is Tensor else None


def _number_given(node: Any) -> Optional[Tensor]:
    """Return the tensor of one number that a result is multiplied with or divided by, if any.

    None of a number of Python's, which is the script's own, and of a loss scaler's factor.
    """
    edges = [other is not None for other, _ in node.next_functions]
    if name_of(node) not in ("Mul", "Div") or edges.count(False) != 1 or is_scaler_node(node):
        return None
    name = "_saved_other" if edges[0] else "_saved_self"
    value = getattr(node, name) if hasattr(type(node), name) else None
    if type(value) is not Tensor or value.dim() or _is_pythons(value):
        return None
    if value.dtype == torch.int64 and _is_smoothed_sum(node.next_functions[0][0]):
        return None  # torch's own count of the samples that its mask leaves in
    return value.detach()


def _is_smoothed_sum(node: Any) -> bool:
    """Whether a node sums up what `_mask_of_smoothed` knows."""
    if node is None or name_of(node) != "Sum":
        return False
    return _mask_of_smoothed(node.next_functions[0][0]) is not None


def _is_pythons(value: Tensor) -> bool:
    """Whether torch made a tensor of one of Python's numbers: any other dtype goes before its."""
    if value.dtype not in (torch.float64, torch.int64):
        return False
    least = torch.zeros((), dtype=torch.float16 if value.is_floating_point() else torch.int8)
    return torch.result_type(value.cpu() if value.is_cuda else value, least) != value.dtype


def is_given_data(node: Any, is_in_sum: bool = False, is_held: bool = False) -> bool:
    """Whether an operator after the model was given a tensor that needs no gradient, or an index.

    A number, as what a loss is divided by, is none, nor one that is added to the loss: it has no
    part in a gradient. The target and the weights of a loss of torch's are taken elsewhere.
    """
    # of what is written into a part of a result, no operator is to be seen
    is_hidden = name_of(node) == "CopySlices"
    if is_hidden or isinstance(node, torch.autograd.function.BackwardCFunction):
        return True
    saved = [each[len(_SAVED) :] for each in dir(type(node)) if each.startswith(_SAVED)]
    taken = {*_WEIGHTS, "target", "targets"} if is_held else set()
    others = {x.rstrip("0123456789") for x in saved if x not in taken | _IS_OPERAND}
    if others - _IS_OPERAND:
        return True
    if is_held or all(other is not None for other, _ in node.next_functions):
        return False
    name = name_of(node)
    if is_scaler_node(node) or (name in ("Mul", "Div") and _is_times_number(node)):
        return False
    metadata = getattr(node, "_input_metadata", None)  # torch 2.1 has none
    is_number = bool(metadata) and len(metadata[0].shape) == 0
    return not (is_number and is_in_sum and name in ("Add", "Sub"))


def _is_times_number(node: Any) -> bool:
    """Whether a product or a quotient has a number of Python's or a tensor of one beside it."""
    name = "_saved_other" if node.next_functions[0][0] is not None else "_saved_self"
    value = getattr(node, name) if hasattr(type(node), name) else None
    return type(value) is Tensor and value.dim() == 0


def name_of(node: Any) -> str:
    """Return what torch calls an operator in autograd's record, as Mul."""
    name = node.name().rsplit("::", 1)[-1].rstrip("0123456789")
    return name[: -len("Backward")] if name.endswith("Backward") else name
