"""Finds attention that a model writes by hand, by what flows into what in one eager forward pass.

Attention is a softmax, or an exp that is also summed, of scores that are a product of two
activations, and its result multiplies a matrix again. A router is none: its scores are an
activation times a weight. A `TorchFunctionMode` looks at the functions that the model calls; it
changes none of them, and sees nothing of what a fused or scripted one does inside. Leaves out what
is said of it (`coverage`).
"""

from collections.abc import Iterator
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from stability.intercept.catcher import Catcher

__all__ = ["HandWritten"]

_PRODUCTS = {"matmul", "rmatmul", "bmm", "baddbmm", "addbmm", "mm", "addmm", "einsum", "linear"}
_SOFTMAXES = {"softmax", "softmin", "safe_softmax"}
_EXPS = {"exp", "exp2", "expm1"}
_SUMS = {"sum", "cumsum", "einsum"}
_PARTS = {
    *("getitem", "get", "chunk", "split", "unbind", "narrow", "select", "index_select"),
    *("cat", "concat", "stack", "expand", "repeat", "repeat_interleave", "tril", "triu", "pad"),
}
"""Functions whose result has another size and holds what they were given all the same."""


class _Is(Flag):
    """What a tensor is known to be."""

    WEIGHT = auto()
    SCORES = auto()
    """A product of two activations."""
    EXP = auto()
    PROBABILITIES = auto()


_NOTHING = _Is(0)


class HandWritten(TorchFunctionMode):
    """Notes in `found` the modules, by name, that multiply probabilities with a matrix."""

    def __init__(self, catcher: Catcher, found: set[str]) -> None:
        super().__init__()
        self._catcher = catcher
        self._found = found
        self._marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._summed: set[str] = set()
        """The modules that have summed an exp of scores."""
        self._multiplied: set[str] = set()
        """Those that have multiplied a matrix with one."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what went in and came out."""
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # a graph is to be what it is without this
            return out
        # what a caught call does inside is no second attention
        if self._catcher.may_catch:
            name = getattr(func, "__name__", "").strip("_")
            self._note(name, list(_tensors((*args, *(kwargs or {}).values()))), out)
        return out

    def _note(self, name: str, inputs: list[Tensor], out: Any) -> None:
        marks = [self._mark(x) for x in inputs]
        of_all = _NOTHING
        for mark in marks:
            of_all |= mark
        if name in _SUMS and _Is.EXP in of_all:
            self._note_exp(self._summed)
        if name in _PRODUCTS:
            self._note_product(marks[-2:], out)
        elif name in _SOFTMAXES:
            self._set(out, _Is.PROBABILITIES if _Is.SCORES in of_all else _NOTHING)
        elif name in _EXPS:
            self._set(out, _Is.EXP if _Is.SCORES in of_all else _NOTHING)
        else:
            self._inherit(name, inputs, marks, out)

    def _note_product(self, factors: list[_Is], out: Any) -> None:
        activations = [mark for mark in factors if _Is.WEIGHT not in mark]
        if len(activations) < 2:
            return
        if any(_Is.PROBABILITIES in mark for mark in activations):
            self._found.add(self._catcher.running_layer())
        elif any(_Is.EXP in mark for mark in activations):
            self._note_exp(self._multiplied)
        self._set(out, _Is.SCORES)

    def _note_exp(self, modules: set[str]) -> None:
        layer = self._catcher.running_layer()
        modules.add(layer)
        if layer in self._summed and layer in self._multiplied:
            self._found.add(layer)

    def _inherit(self, name: str, inputs: list[Tensor], marks: list[_Is], out: Any) -> None:
        """Mark what came out as what went in, where it is no smaller sum of it."""
        is_weight = bool(marks) and all(_Is.WEIGHT in mark for mark in marks)
        for result in _tensors([out]):
            mark = _Is.WEIGHT if is_weight else _NOTHING
            for x, of_x in zip(inputs, marks, strict=True):
                if name in _PARTS or x.numel() == result.numel():
                    mark |= of_x & ~_Is.WEIGHT
            self._set(result, mark)

    def _mark(self, x: Tensor) -> _Is:
        known: _Is = self._marks.get(x, _NOTHING)  # pyright: ignore[reportAssignmentType]
        return _Is.WEIGHT if isinstance(x, nn.Parameter) else known

    def _set(self, x: Any, mark: _Is) -> None:
        if isinstance(x, Tensor) and (mark or x in self._marks):
            self._marks[x] = mark


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)
