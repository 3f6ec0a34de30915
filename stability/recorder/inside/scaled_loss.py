"""The loss that a script means, where a loss scaler has multiplied it before it is back-propagated.

What a scaler returns is marked in autograd's record with its factor. A script may still divide it,
as by its number of micro-batches, or add several up: what is linear in the marked values is divided
by the factor again. Of anything else nobody can tell what was meant, and that is said.
"""

from __future__ import annotations

from typing import Any, List, Optional, Tuple

from torch import Tensor

__all__ = ["is_linear", "is_scaler_node", "mark_scaled", "unscaled"]

_UNTOLD = "the loss that a loss scaler has scaled (it was back-propagated with something else)"
_LOSS = "_stability_unscaled_loss"
_FACTOR = "_stability_loss_scale"
"""How a node of autograd's record is marked; torch keeps such words until the node is gone."""
_MOST_NODES = 256
_MOST_BELOW = 64
"""Nodes that are looked at: of a sum of losses, and below what is no sum."""
_LINEAR = ("Add", "Sub", "Neg", "Div", "Mul", "Sum", "Mean", "Stack", "Cat", "View", "Reshape")
_LINEAR += ("Squeeze", "Unsqueeze", "Select", "Slice", "Unbind", "ToCopy", "Clone", "Expand")
_LINEAR += ("UnsafeView", "Alias", "Permute", "Transpose", "T", "Split", "MulScalar", "DivScalar")
"""Of torch's operators those that a sum of losses, or a part of one, is made by."""


def mark_scaled(scaler: Any, result: Any, given: Any) -> None:
    """Mark what a scaler has made of `given`."""
    if isinstance(result, (list, tuple)) and isinstance(given, (list, tuple)):
        for one, own in zip(result, given):  # noqa: B905 Python 3.9 has no strict
            mark_scaled(scaler, one, own)
    elif isinstance(result, Tensor) and isinstance(given, Tensor) and result is not given:
        node: Any = result.grad_fn
        if node is not None:  # else nobody can back-propagate it
            node.metadata[_FACTOR] = _factor_of(scaler)
            setattr(result, _LOSS, (given.detach(), given._version, result._version))


def _factor_of(scaler: Any) -> Optional[Tensor]:
    """Return a copy of a scaler's factor, one and the same until it changes that where it is.

    None of a scaler that has another kind of factor than torch's.
    """
    factor = getattr(scaler, "_scale", None)
    if not isinstance(factor, Tensor):
        return None
    copy: Any
    known, version, copy = getattr(scaler, _FACTOR, (None, -1, None))
    if known is not factor or version != factor._version:
        copy = factor.detach().clone()
        setattr(scaler, _FACTOR, (factor, factor._version, copy))
    return copy


def unscaled(loss: Tensor) -> Tuple[Optional[Tensor], str]:
    """Return the loss that was meant, and in words why it can't be told, if it can't."""
    known, *versions = getattr(loss, _LOSS, (None,))
    # a script may have written into either since, as to divide it in its place
    if known is not None and versions == [known._version, loss._version]:
        return known, ""
    factors, others = _parts(loss.grad_fn)
    if not factors and not _is_marked_below(others):
        return loss, ""
    factor = factors[0] if factors else None
    if others or factor is None or any(x is not factor for x in factors):
        return None, _UNTOLD
    return loss.detach() / factor.to(loss.device), ""


def _parts(node: Any) -> Tuple[List[Optional[Tensor]], List[Any]]:
    """Return the factors of the marked nodes that a loss is linear in, and what else it is of."""
    factors: List[Optional[Tensor]] = []
    others: List[Any] = []
    todo, count = [node] if node is not None else [], 0
    while todo and count < _MOST_NODES:
        node, count = todo.pop(), count + 1
        if _FACTOR in node.metadata:
            factors.append(node.metadata[_FACTOR])
        elif is_linear(node):
            todo += [each for each, _ in node.next_functions if each is not None]
        else:
            others.append(node)
    return factors, others


def _is_marked_below(nodes: List[Any]) -> bool:
    todo, count = list(nodes), 0
    while todo and count < _MOST_BELOW:
        node, count = todo.pop(0), count + 1
        if _FACTOR in node.metadata:
            return True
        todo += [each for each, _ in node.next_functions if each is not None]
    return False


def is_scaler_node(node: Any) -> bool:
    """Whether a node of autograd's record is a loss scaler's product."""
    return _FACTOR in node.metadata


def is_linear(node: Any) -> bool:
    """Whether what a node makes is linear in what of it needs a gradient."""
    name = node.name().partition("Backward")[0]
    of = [each is not None for each, _ in node.next_functions]
    if name in ("Mul", "Div"):  # a product of two results is no multiple of either
        return sum(of) == 1 and (name == "Mul" or of[0])
    return name in _LINEAR
