"""Finds what a model is given, whatever it comes in: tensors, arrays, numbers, words.

What is data but no tensor is made one, so that it can be hashed; what can't be read is told. Leaves
out which of it is data and not a model's own result (`hooks`), and the hash (`batch_hash`).
"""

from __future__ import annotations

import enum
import functools
import hashlib
import types
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any, Iterator, Optional, Set, Tuple

import torch
from torch import Tensor, nn

__all__ = ["is_plain", "tensors_in", "values_in"]

_SETTINGS = (
    *(type(None), type, torch.dtype, torch.device, torch.layout, nn.Module, torch.Generator),
    types.BuiltinFunctionType,
)
"""What is no data. An object that can be called may hold some, as a graph of PyTorch Geometric."""
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial)
"""What may hold data, as the labels that a loss was made for."""
_NUMBERS = (bool, int, float)


def is_plain(x: Tensor) -> bool:
    """Whether a tensor has memory of its own to be read: no shard, and not inside torch.func."""
    if type(x) not in (Tensor, nn.Parameter):
        return False
    functorch: Any = getattr(torch._C, "_functorch", None)
    is_wrapped = getattr(functorch, "is_functorch_wrapped_tensor", lambda _: False)
    return not is_wrapped(x)


def tensors_in(value: Any, name: str, inside: Tuple[int, ...] = ()) -> Iterator[Tuple[str, Tensor]]:
    """Give the tensors in arguments or results, each with its name, however deep they are.

    `inside` are the containers around, of which one may hold itself.
    """
    if isinstance(value, Tensor):
        if _has_rows(value):
            yield name, value
    elif id(value) not in inside:
        for own, item in _parts(value, name):
            yield from tensors_in(item, own, (*inside, id(value)))


def values_in(
    value: Any, name: str, unread: Set[str], inside: Tuple[int, ...] = ()
) -> Iterator[Tuple[str, Tensor]]:
    """Give what stands in arguments beside plain tensors, as tensors; `unread` is told of others.

    A list of numbers is one tensor, a word a number. `inside` are the containers around.
    """
    if isinstance(value, _SETTINGS) or id(value) in inside:
        return
    found = _of_one_kind(value)
    if found is not None:
        yield name, found
    elif isinstance(value, Tensor):
        yield from _of_layout(value, name, unread)
    elif type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "dtype"):
        yield from _of_array(value, name, unread)
    elif isinstance(value, (Mapping, list, tuple, *_FUNCTIONS)) or is_dataclass(value):
        for own, item in _parts(value, name):
            yield from values_in(item, own, unread, (*inside, id(value)))
    else:
        unread.add(f"{name}, a {type(value).__name__}")


def _parts(value: Any, name: str) -> Iterator[Tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key in sorted(value, key=str):
            yield str(key), value[key]
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield name or f"argument {index}", item
    elif is_dataclass(value) and not isinstance(value, type):
        for each in fields(value):
            yield each.name, getattr(value, each.name, None)
    elif isinstance(value, _FUNCTIONS):
        yield from _held_by(value, name)


def _held_by(function: Any, name: str) -> Iterator[Tuple[str, Any]]:
    """Give what a function has kept: arguments of a partial, defaults, variables around it."""
    if isinstance(function, functools.partial):
        held = {**dict(enumerate(function.args)), **function.keywords, "func": function.func}
    elif isinstance(function, types.MethodType):
        own = function.__self__
        is_known = isinstance(own, (nn.Module, type))
        held = {} if is_known else {"self": getattr(own, "__dict__", own)}
        held["func"] = function.__func__
    else:
        around = zip(function.__code__.co_freevars, function.__closure__ or ())  # noqa: B905
        held = {key: cell.cell_contents for key, cell in around if _is_filled(cell)}
        held.update(enumerate(function.__defaults__ or ()))
        held.update(function.__kwdefaults__ or {})
    for key, item in held.items():
        if item is function:  # which is among its own variables where it calls itself
            continue
        is_inner = isinstance(item, types.FunctionType) and isinstance(function, types.FunctionType)
        yield f"{key} in {name or 'a function'}", _Inner() if is_inner and _holds(item) else item


class _Inner:
    """Stands for a function inside of one, whose variables are not looked at."""


def _holds(function: Any) -> bool:
    return bool(function.__closure__ or function.__defaults__ or function.__kwdefaults__)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # a variable that has no value yet
        return False


def _of_one_kind(value: Any) -> Optional[Tensor]:
    """Return a number, a word or a list of them as a tensor; None for anything else."""
    if isinstance(value, _NUMBERS):
        return _of_numbers(value)
    if isinstance(value, enum.Enum):
        # flags that are combined have no name in Python 3.9
        return _of_word(f"{type(value).__name__}.{value.name or repr(value.value)}")
    if isinstance(value, (str, bytes)):
        return _of_word(value)
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(x, _NUMBERS) for x in value):
        return _of_numbers(value)
    if all(isinstance(x, (str, bytes)) for x in value):
        return torch.stack([_of_word(x) for x in value])
    return None


def _of_layout(value: Tensor, name: str, unread: Set[str]) -> Iterator[Tuple[str, Tensor]]:
    """Give what a tensor holds that has no rows; those that have come by `tensors_in`."""
    if value.layout == torch.sparse_coo:
        whole = value.detach().coalesce()
        yield f"{name}, indices", whole.indices().t()
        yield name, whole.values()
    elif value.device.type != "meta" and not _has_rows(value):
        kind = "nested" if value.is_nested else "quantized" if value.is_quantized else value.layout
        unread.add(f"{name}, a tensor of layout {kind}")


def _has_rows(value: Tensor) -> bool:
    """Whether a tensor's elements lie in memory, row by row, as they are."""
    is_strided = value.layout == torch.strided and value.device.type != "meta"
    return is_strided and not value.is_nested and not value.is_quantized


def _of_numbers(value: Any) -> Tensor:
    try:
        found = torch.tensor(value)
    except (OverflowError, RuntimeError, ValueError):  # more than 64 bits
        return _of_word(repr(value))
    return found.to(torch.float64) if found.is_floating_point() else found


def _of_word(word: Any) -> Tensor:
    digest = hashlib.sha256(repr(word).encode()).digest()
    return torch.tensor(int.from_bytes(digest[:8], "little", signed=True))


def _of_array(value: Any, name: str, unread: Set[str]) -> Iterator[Tuple[str, Tensor]]:
    try:
        yield name, torch.tensor(value)
    except (TypeError, RuntimeError, ValueError):
        unread.add(f"{name}, an array of {value.dtype}")
