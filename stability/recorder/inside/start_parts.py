"""Hashes of what a training starts from besides its weights: other buffers, optimizers' state.

Masks, counters and frequencies are in no snapshot, since drift is measured over floating-point
weights, and neither are the moments that an optimizer resumes with; they decide bits nevertheless.
Leaves out the weights themselves (`training`).
"""

from __future__ import annotations

import hashlib
from typing import Any, Dict, Iterable, List, Mapping, Tuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from .environment import hash_state
from .names import other_buffers

__all__ = ["NOT_HASHED", "hash_buffers", "hash_optimizers", "hash_part", "is_strided", "set_since"]

NOT_HASHED = "not hashed"
"""What stands for the hash of what can't be read: it is equal to nothing."""


def hash_buffers(state: Dict[str, Tensor], owners: List[nn.Module]) -> Dict[str, str]:
    """Return a hash by name of each buffer of `owners` that is not in `state`."""
    return {name: hash_part(x) for name, x in other_buffers(state, owners).items()}


def set_since(was: Mapping[str, str], now: Mapping[str, str]) -> Dict[str, str]:
    """Return what of `now` is no longer as it was, by names that say so.

    Not what a forward pass counts itself: how often depends on how a batch is cut.
    """
    return {
        f"{name} before the first step": value
        for name, value in now.items()
        if was.get(name) != value and not name.endswith("num_batches_tracked")
    }


def hash_optimizers(optimizers: Iterable[Optimizer], state: Mapping[str, Tensor]) -> Dict[str, str]:
    """Return a hash of each kind of state that optimizers hold, over the weights by name.

    Nothing for those that have not stepped. Every rank must ask, since shards are gathered.
    """
    names = {id(x): name for name, x in state.items()}
    found: Dict[str, List[str]] = {}
    for optimizer in optimizers:
        weights = [x for group in optimizer.param_groups for x in group["params"]]
        places = {id(x): f"weight {place}" for place, x in enumerate(weights)}
        for owner, values in optimizer.state.items():
            name = names.get(id(owner)) or places.get(id(owner)) or str(type(owner))
            items = values.items() if isinstance(values, dict) else [(str(owner), values)]
            for key, value in items:
                found.setdefault(str(key), []).append(f"{name}\0{hash_part(value)}")
    return {key: _of_all(lines) for key, lines in found.items()}


def _of_all(lines: List[str]) -> str:
    if any(line.endswith(NOT_HASHED) for line in lines):
        return NOT_HASHED
    return hashlib.sha256("\0".join(sorted(lines)).encode()).hexdigest()[:16]


def hash_part(value: Any) -> str:
    """Return a short hash of a tensor, a number or a collection; `NOT_HASHED` for all else."""
    if isinstance(value, Tensor):
        return hash_state({"": value})[:16] if _is_readable(value) else NOT_HASHED
    if isinstance(value, (dict, list, tuple)):
        items: List[Tuple[Any, Any]] = list(
            value.items() if isinstance(value, dict) else enumerate(value)
        )
        return _of_all(
            [f"{index:08} {key}\0{hash_part(x)}" for index, (key, x) in enumerate(items)]
        )
    is_plain = value is None or isinstance(value, (bool, int, float, str))
    return repr(value) if is_plain else NOT_HASHED


def _is_readable(x: Tensor) -> bool:
    """Whether the tensor's bits lie in memory of its own, one after another."""
    is_own = type(x) in (Tensor, nn.Parameter) or hasattr(x, "full_tensor")
    return is_own and is_strided(x) and not x.is_quantized


def is_strided(x: Tensor) -> bool:
    """Whether the tensor has memory, one element after another."""
    return x.layout is torch.strided and not x.is_meta
