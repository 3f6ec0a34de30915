"""Finds attention that a model writes by hand, by what flows into what in a pass or in a graph.

Attention is a softmax, or an exp that is also summed, of scores that are a product of two
activations, and its result multiplies a matrix again. A router is none: its scores are an
activation times a weight. A kernel of torch's that is called by its own operator is one, too. In an
eager forward pass a `TorchFunctionMode` looks at the functions that the model calls; it changes
none of them, and sees nothing of what a fused or scripted one does inside. Of what torch.compile
traces, the graph is read before it is compiled. Leaves out what is said of it (`coverage`,
`compiled_taps`).
"""

from collections.abc import Callable, Iterator
from enum import Flag, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from stability.intercept.catcher import Catcher

__all__ = ["HandWritten", "paths_by_hand"]

_PRODUCTS = {"matmul", "rmatmul", "bmm", "baddbmm", "addbmm", "mm", "addmm", "einsum", "linear"}
_SOFTMAXES = {"softmax", "softmin", "safe_softmax"}
_EXPS = {"exp", "exp2", "expm1", "rpow"}
_SUMS = {"sum", "cumsum", "einsum"}
_SUMMED_EXPS = {"logsumexp", "log_softmax"}
_KERNELS = ("scaled_dot_product_", "flash_attention_forward", "efficient_attention_forward")
_CAUGHT = "scaled_dot_product_attention"
"""How names of torch's own kernels begin, and the one that a door is for."""
_TIMES = {"mul", "multiply", "rmul"}
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
    OUTER = auto()
    """The terms of one that are still to be summed."""
    EXP = auto()
    PROBABILITIES = auto()


_NOTHING = _Is(0)


class HandWritten(TorchFunctionMode):
    """Notes in `found` the modules, by name, that multiply probabilities with a matrix."""

    def __init__(self, catcher: Catcher, found: set[str]) -> None:
        super().__init__()
        self._catcher = catcher
        self._flow = _Flow(catcher.running_layer, found)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and look at what went in and came out."""
        out = func(*args, **(kwargs or {}))
        if torch.compiler.is_dynamo_compiling():  # a graph is to be what it is without this
            return out
        # what a caught call does inside is no second attention
        if self._catcher.may_catch:
            name = getattr(func, "__name__", "")
            self._flow.note(name, list(_tensors((*args, *(kwargs or {}).values()))), out)
        return out


def paths_by_hand(graph: torch.fx.GraphModule) -> set[str]:
    """Return the modules that do so in a graph of Dynamo, as it writes them; empty for the root.

    Nothing here asks for a symbolic size, which would become a guard of the graph.
    """
    paths: set[str] = set()
    for one in graph.modules():
        if not isinstance(one, torch.fx.GraphModule):
            continue
        path = ""
        flow = _Flow(lambda: path, paths)  # noqa: B023, called in this round alone
        for node in one.graph.nodes:
            if node.op not in ("call_function", "call_method"):
                continue
            stack = node.meta.get("nn_module_stack") or {}
            path = list(stack.values())[-1][0] if stack else ""
            name = node.target if isinstance(node.target, str) else _name(node.target)
            given = [
                x.meta.get("example_value") for x in _nodes((*node.args, *node.kwargs.values()))
            ]
            flow.note(name, list(_tensors(given)), node.meta.get("example_value"))
    return paths


class _Flow:
    """Follows tensors from function to function."""

    def __init__(self, layer: Callable[[], str], found: set[str]) -> None:
        self._layer = layer
        """Says which module calls now."""
        self._found = found
        self._marks: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._summed: set[str] = set()
        """The modules that have summed an exp of scores."""
        self._multiplied: set[str] = set()
        """Those that have multiplied a matrix with one."""

    def note(self, name: str, inputs: list[Tensor], out: Any) -> None:
        """Look at what went into a function and what came out."""
        name = name.strip("_")
        marks = [self._mark(x) for x in inputs]
        of_all = _NOTHING
        for mark in marks:
            of_all |= mark
        of_summed = _Is.SCORES if name in _SUMMED_EXPS else _Is.EXP
        if name in _SUMS | _SUMMED_EXPS and of_summed in of_all:
            self._note_exp(self._summed)
        if name.startswith(_KERNELS) and name.partition(".")[0] != _CAUGHT:
            self._found.add(self._layer())
        elif name in _PRODUCTS:
            self._note_product(marks[-2:], out, _Is.SCORES)
        elif name in _TIMES and _is_outer(inputs, out):
            self._note_product(marks, out, _Is.OUTER)
        elif name in _SUMS and _Is.OUTER in of_all:
            self._set(out, _Is.SCORES)
        elif name in _SOFTMAXES:
            self._set(out, _Is.PROBABILITIES if _Is.SCORES in of_all else _NOTHING)
        elif name in _EXPS:
            self._set(out, _Is.EXP if _Is.SCORES in of_all else _NOTHING)
        else:
            self._inherit(name, inputs, marks, out)

    def _note_product(self, factors: list[_Is], out: Any, made: _Is) -> None:
        activations = [mark for mark in factors if _Is.WEIGHT not in mark]
        if len(activations) < 2:
            return
        if any(_Is.PROBABILITIES in mark for mark in activations):
            self._found.add(self._layer())
        elif any(_Is.EXP in mark for mark in activations):
            self._note_exp(self._multiplied)
        self._set(out, made)

    def _note_exp(self, modules: set[str]) -> None:
        layer = self._layer()
        modules.add(layer)
        if layer in self._summed and layer in self._multiplied:
            self._found.add(layer)

    def _inherit(self, name: str, inputs: list[Tensor], marks: list[_Is], out: Any) -> None:
        """Mark what came out as what went in, where it is no smaller sum of it."""
        is_weight = bool(marks) and all(_Is.WEIGHT in mark for mark in marks)
        for result in _tensors([out]):
            mark = _Is.WEIGHT if is_weight else _NOTHING
            for x, of_x in zip(inputs, marks, strict=True):
                if name in _PARTS or _same_size(x, result):
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


def _nodes(values: Any) -> Iterator[torch.fx.Node]:
    for value in values:
        if isinstance(value, torch.fx.Node):
            yield value
        elif isinstance(value, list | tuple):
            yield from _nodes(value)


def _name(target: Any) -> str:
    return getattr(target, "__name__", "")


def _is_outer(inputs: list[Tensor], out: Any) -> bool:
    """Whether each of two factors was spread over the other; no symbolic size is asked for."""
    if len(inputs) != 2 or not isinstance(out, Tensor):
        return False
    first, second, made = (x.numel() for x in (*inputs, out))
    are_known = isinstance(first, int) and isinstance(second, int) and isinstance(made, int)
    return are_known and max(first, second) < made


def _same_size(x: Tensor, y: Tensor) -> bool:
    same = x.numel() == y.numel()
    if isinstance(same, bool):
        return same
    from torch.fx.experimental.symbolic_shapes import statically_known_true  # heavy

    return statically_known_true(same)
