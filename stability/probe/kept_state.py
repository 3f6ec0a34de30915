"""Copies of what a module, an optimizer or a call's arguments hold, so that a repeat writes there.

Tensors are copied wherever they are held: in lists, tuples, sets, mappings, dataclasses, and in
plain objects, of which all is tensors, numbers, text and containers of these, e.g. a cache of keys
and values. Generators of random numbers are copied where they stand. What is held twice is one
copy. Leaves out any other object, as a trainer, a process group or a function's closure: these stay
the run's own.
"""

import random
from collections import deque
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from dataclasses import is_dataclass
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = ["Copies"]

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice),
    *(torch.dtype, torch.device, torch.Size, Enum),
)
_DEPTH = 6
"""Beyond it an object is not plain: what is that deep is no state of one module."""


class Copies:
    """Copies values; `of_tensor` makes the copy of a tensor, `made` holds those that are there."""

    def __init__(self, of_tensor: Callable[[Tensor], Any]) -> None:
        self.made: dict[int, Any] = {}
        """By the original's id; originals must live meanwhile."""
        self._of_tensor = of_tensor
        self._are_plain: dict[int, bool] = {}

    def of(self, value: Any) -> Any:
        """Return a copy of `value`, or `value` itself where it is none that a repeat may own."""
        if isinstance(value, _VALUES):
            return value
        if id(value) not in self.made:
            self.made[id(value)] = self._copied(value)
        return self.made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._of_tensor(value)
        if isinstance(value, torch.Generator):
            return value.clone_state()
        if isinstance(value, random.Random):
            return deepcopy(value)
        if isinstance(value, tuple):
            parts = [self.of(part) for part in value]
            if all(x is y for x, y in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        if isinstance(value, list | deque | set | Mapping) or self._is_plain(value, 0):
            return self._filled(value)
        return value

    def _filled(self, value: Any) -> Any:
        """Return a shallow copy of a container or an object, with copies in it."""
        try:
            new = copy(value)
        except Exception:  # whatever a class of the user's own raises: it is no plain one
            return value
        self.made[id(value)] = new  # it may hold itself
        if isinstance(value, list | deque):
            for i, part in enumerate(value):
                new[i] = self.of(part)
        elif isinstance(value, dict):
            for key, part in value.items():
                # what a subclass does with an item, as to keep an attribute, was done by `copy`
                dict.__setitem__(new, key, self.of(part))
        if hasattr(new, "__dict__"):
            for name, part in vars(value).items():
                vars(new)[name] = self.of(part)
        return new

    def _is_plain(self, value: Any, depth: int) -> bool:
        """Whether all that is in `value` is tensors, values and containers or objects of these."""
        if isinstance(value, (*_VALUES, Tensor, torch.Generator, random.Random)):
            return True
        if depth > _DEPTH or callable(value) or isinstance(value, type | ModuleType):
            return False
        if isinstance(value, nn.Module | Optimizer):
            return False
        if id(value) not in self._are_plain:
            self._are_plain[id(value)] = True  # it may hold itself
            parts = _parts(value)
            self._are_plain[id(value)] = parts is not None and all(
                self._is_plain(part, depth + 1) for part in parts
            )
        return self._are_plain[id(value)]


def _parts(value: Any) -> list[Any] | None:
    """Return what `value` holds, None if that cannot be told."""
    if isinstance(value, list | tuple | set | frozenset | deque):
        return list(value)
    if isinstance(value, Mapping):
        return [part for pair in value.items() for part in pair]
    if is_dataclass(value) or hasattr(value, "__dict__"):
        return list(vars(value).values()) if hasattr(value, "__dict__") else None
    return None
