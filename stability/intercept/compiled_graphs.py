"""Which layer an attention call inside a graph of Inductor belongs to.

Dynamo knows the module of every operation; the code that Inductor writes knows the name of the
operation, in the comment above a call. While `naming_graphs` is open the names are kept beside each
graph that is compiled, and the compiled function says which graph runs. Nothing is put into the
graph, so the code is what it would be without. Graphs are shared (blocks of one class have one), so
the module itself is looked up when the graph runs, from the frame that runs it.

Leaves out how calls are observed (`compiled_taps`), and graphs of other backends than Inductor.
"""

import linecache
import re
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from stability.intercept.handwritten import paths_by_hand

__all__ = [
    "GraphRun",
    "Operation",
    "alike",
    "current_run",
    "following_runs",
    "naming_graphs",
    "source_names",
]

_NAME = re.compile("attention|attn", re.IGNORECASE)
_SOURCES = re.compile(r"# .*Source Nodes: \[(.*?)\]")
_ROOT = re.compile(r"([LG])\['(\w+)'\]")
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\['(\w+)'\]")
"""A part of such a path: an attribute, or what stands at an index, as in `L['args'][0].layers`."""
_MACHINERY = ("torch/_dynamo/", "torch/fx/", "<eval_with_key>")
"""Files whose frames lie between a compiled graph and the frame that Dynamo compiled."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """An attention call in the graph that Dynamo traced: its name there, and that of its module."""

    function: str
    name: str
    operands: tuple[str, ...]
    """The names of q, k, v and the mask, if there is one."""
    path: str
    """The innermost module as Dynamo writes it, e.g. `L['self'].layers.0`; empty at the root."""
    index: int
    """Its place in the order in which Python would run the calls."""

    def likeness(self, names: Collection[str]) -> int:
        """Return how much speaks for a call with these source names being this one; 0 nothing.

        A call names itself, and what of its operands is no buffer of its own. In a checkpointed
        block it names its operands alone.
        """
        own = len(self.operands) + 1 if self.name in names else 0
        return own + sum(name in names for name in self.operands)


@dataclass(kw_only=True, slots=True)
class GraphRun:
    """One run of a compiled graph, and the operations whose calls have been met in it so far."""

    operations: tuple[Operation, ...]
    by_hand: tuple[str, ...]
    """The paths of the modules that write attention by hand."""
    frame: FrameType | None
    """The one that calls the graph, only while it runs."""
    met: list[Operation] = field(default_factory=list)

    def meet(self, names: Collection[str]) -> Operation | None:
        """Return the operation that the call with these source names is; None if unsure.

        Calls must come in Python's order. Inductor may swap independent ones; but a cached graph,
        whose names other code has given, would show in the same way.
        """
        last = self.met[-1].index if self.met else -1
        later = [x for x in alike(self.operations, names) if x.index > last]
        self.met += later[:1]
        return later[0] if later else None

    def module(self, operation: Operation) -> nn.Module | None:
        """Return the module that makes the call while the graph runs; None if not found."""
        return None if self.frame is None else _module_at(operation.path, self.frame)

    def modules_by_hand(self) -> list[nn.Module]:
        """Return the modules that write attention by hand, while the graph runs."""
        frame = self.frame
        found = [] if frame is None else [_module_at(path, frame) for path in self.by_hand]
        return [x for x in found if x is not None]

    def not_met(self) -> list[Operation]:
        """Return the operations of which no call has been met."""
        return [x for x in self.operations if x not in self.met]


def alike(operations: Collection[Operation], names: Collection[str]) -> list[Operation]:
    """Return the operations that a call with these source names can be, in Python's order."""
    if not names and len(operations) == 1:
        return list(operations)  # code in C++ shows no names; an only call needs none
    most = max((x.likeness(names) for x in operations), default=0)
    return [x for x in operations if most and x.likeness(names) == most]


_LOCAL = threading.local()
_LOCK = threading.Lock()
_open = 0
_on_end: list[Callable[[GraphRun], None]] = []


def current_run() -> GraphRun | None:
    """Return the run of the named graph that is running in this thread, None if none is."""
    runs = getattr(_LOCAL, "runs", ())
    return runs[-1] if runs else None


@contextmanager
def following_runs(on_end: Callable[[GraphRun], None]) -> Iterator[None]:
    """Inside, `current_run` is known, and `on_end` is given each run when its graph has ended."""
    _on_end.append(on_end)
    try:
        yield
    finally:
        _on_end.remove(on_end)


@contextmanager
def naming_graphs() -> Iterator[None]:
    """Inside, graphs that `torch.compile` hands to Inductor can be named, then and later."""
    global _open
    # the backend of torch.compile; its own function would have to be imported, which takes seconds
    backend = torch._TorchCompileInductorWrapper
    with _LOCK:
        if not _open:
            backend.__call__ = _naming(backend.__call__)
        _open += 1
    try:
        yield
    finally:
        with _LOCK:
            _open -= 1
            if not _open:
                backend.__call__ = backend.__call__.__wrapped__  # pyright: ignore


def _naming(compile_graph: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(compile_graph)
    def naming(backend: Any, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        # before it is compiled, which may change it
        operations = tuple(_operations(graph))
        by_hand = tuple(sorted(paths_by_hand(graph)))
        return _named(compile_graph(backend, graph, inputs), operations, by_hand)

    return naming


def _named(
    compiled: Callable[..., Any], operations: tuple[Operation, ...], by_hand: tuple[str, ...]
) -> Callable[..., Any]:
    @wraps(compiled)
    def run(*args: Any) -> Any:
        if not _on_end:
            return compiled(*args)
        current = GraphRun(operations=operations, by_hand=by_hand, frame=sys._getframe(1))
        runs = _LOCAL.__dict__.setdefault("runs", [])
        runs.append(current)
        try:
            result = compiled(*args)
            for on_end in tuple(_on_end):
                on_end(current)
            return result
        finally:
            runs.pop()
            current.frame = None

    return run


def _operations(graph: torch.fx.GraphModule) -> Iterator[Operation]:
    """Yield the attention calls in the order in which Python would run them."""
    for index, node in enumerate(_nodes(graph)):
        stack = node.meta.get("nn_module_stack") or {}
        given = [*node.args, *node.kwargs.values()]
        yield Operation(
            function=_attention(node.target),
            name=node.name,
            operands=tuple(x.name for x in given if isinstance(x, torch.fx.Node)),
            path=list(stack.values())[-1][0] if stack else "",
            index=index,
        )


def _nodes(graph: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """Yield the attention calls, those of subgraphs, e.g. of a checkpoint, in their place."""
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        if _attention(node.target):
            yield node
        elif isinstance(node.target, torch._ops.HigherOrderOperator):
            for argument in node.args:
                if isinstance(argument, torch.fx.Node) and argument.op == "get_attr":
                    inner = getattr(graph, str(argument.target), None)
                    if isinstance(inner, torch.fx.GraphModule):
                        yield from _nodes(inner)


def _attention(target: Any) -> str:
    # as a whole where torch's own MultiheadAttention calls it
    if target in (F.scaled_dot_product_attention, F.multi_head_attention_forward):
        return "scaled_dot_product_attention"
    if str(target) == "flex_attention":
        return "flex_attention"
    # an operator of a library, e.g. flash_attn::_flash_attn_forward
    name = target.name() if isinstance(target, torch._ops.OpOverload) else ""
    if isinstance(target, torch._ops.OpOverloadPacket):
        name = target._qualified_op_name
    is_one = _NAME.search(name) or name.startswith("attention_kernels::")
    return name if is_one and not name.startswith("aten::") else ""


def _frames_above(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _module_at(path: str, frame: FrameType) -> nn.Module | None:
    """Return the module that Dynamo's path, e.g. `L['self'].layers.0`, leads to.

    It is a path from the frame that Dynamo compiled, which is the first above `frame` from which
    it leads to a module.
    """
    for above in _frames_above(frame):
        module = _root_module(above) if not path else _follow(path, above)
        if isinstance(module, nn.Module) and not isinstance(module, torch.fx.GraphModule):
            return module
    return None


def _root_module(frame: FrameType) -> Any:
    """Return whose forward `frame` runs: a graph that calls no module is of that one."""
    if any(part in frame.f_code.co_filename for part in _MACHINERY):
        return None
    return frame.f_locals.get(next(iter(frame.f_code.co_varnames), ""))


def _follow(path: str, frame: FrameType) -> Any:
    root = _ROOT.match(path)
    if root is None:
        return None
    variables: Mapping[str, Any] = frame.f_globals if root[1] == "G" else frame.f_locals
    found = variables.get(root[2])
    for attribute, index, key in _STEP.findall(path, root.end()):
        try:
            at = int(index) if index else key
            found = getattr(found, attribute) if attribute else found[at]  # pyright: ignore
        except (AttributeError, LookupError, TypeError):  # another frame's variable of that name
            return None
    return found


def source_names(filename: str, line: int) -> list[str]:
    """Return the operations that Inductor names in the comment above a line of its code."""
    for number in range(line - 1, 0, -1):
        text = linecache.getline(filename, number).strip()
        if not text.startswith("#"):
            break
        found = _SOURCES.match(text)
        if found:
            return found[1].split(", ")
    return []
