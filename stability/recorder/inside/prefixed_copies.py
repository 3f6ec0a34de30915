"""Copies of the weights that have other names than theirs: `ema_model.` beside `model.`.

Where several models train each one's name begins those of its weights, and a moving average's copy
of one has no such beginning, or another. It is known by all that it holds: the same names below
both beginnings, the same bits. Leaves out copies with the very names (`names.copies_of`).
"""

from __future__ import annotations

from typing import Dict, List, Mapping

import torch
from torch import Tensor

from .names import named_weights, optimized, outermost_modules

__all__ = ["prefixed_copies"]

_DEEPEST = 3
"""Parts of the longest beginning of a name."""
Group = Dict[str, Tensor]


def prefixed_copies(state: Mapping[str, Tensor]) -> Dict[int, List[Tensor]]:
    """Return the copies of the weights that optimizers update, by the identity of each weight.

    To be asked before the first update, and before any weight is moved.
    """
    trained = optimized()
    own = {name: x for name, x in state.items() if id(x) in trained}
    sources = {} if not own else _by_beginning(own)
    found: Dict[int, List[Tensor]] = {}
    for module in outermost_modules() if own else []:
        others = {name: x for name, x in named_weights(module) if id(x) not in trained}
        for begin, group in _by_beginning(others).items():
            source = next(
                (x for of, x in sources.items() if (of or begin) and _is_copy(group, x)), {}
            )
            for name, copy in group.items() if source else ():
                copies = found.setdefault(id(source[name]), [])
                if not any(copy is known for known in copies):
                    copies.append(copy)
    return found


def _by_beginning(named: Mapping[str, Tensor]) -> Dict[str, Group]:
    """Return tensors by what their names begin with, and by the rest of their names."""
    groups: Dict[str, Group] = {"": dict(named)}
    for name, x in named.items():
        parts = name.split(".")
        for depth in range(1, min(_DEEPEST, len(parts) - 1) + 1):
            begin = ".".join(parts[:depth]) + "."
            groups.setdefault(begin, {})[".".join(parts[depth:])] = x
    return groups


def _is_copy(group: Group, source: Group) -> bool:
    """Whether a group holds what another does, bit by bit, and more than constants."""
    if not group or not all(
        name in source and _is_like(x, source[name]) for name, x in group.items()
    ):
        return False
    with torch.no_grad():
        if not all(x.equal(source[name]) for name, x in group.items()):
            return False
        return any(not _is_constant(x) for x in group.values())


def _is_like(one: Tensor, other: Tensor) -> bool:
    is_same_kind = type(one) is type(other) and one.dtype == other.dtype
    return is_same_kind and one.shape == other.shape and one.device == other.device


def _is_constant(x: Tensor) -> bool:
    # as a bias of zeros, which many layers begin with
    local = getattr(x, "to_local", lambda: x)().detach()
    return local.numel() < 2 or bool((local == local.flatten()[0]).all())
