"""What torch really executed: the dtypes of matrix products and of attention calls, by module.

A `TorchDispatchMode` sees each operator below autocast and autograd, so with the operands as they
were multiplied, whatever a config calls its precision. A product is told by the module whose
forward made it; one of the backward pass by the module in whose forward its autograd node was made.
What a backward runs by itself, a nested autograd or a forward that is computed again, belongs to
the owner of the node that runs it, so an attention's belongs to that attention. The mode runs each
operator as it is and looks at dtypes alone, so no bit depends on it; code that torch.compile has
compiled runs compiled (`ignore_compile_internals`) and is not seen.

Leaves out which operators are products (`products`), what a kernel does inside one operator (a
switch may round the operands there: `known_answers`), and what follows from it all
(`records.witness`). Loaded in the processes of recorded trainings as well (`recorder.inside`),
under another package's name, so on Python 3.9 and by relative imports.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager, nullcontext
from types import ModuleType
from typing import Any, Callable, Iterable, Iterator, List, Mapping, Optional, Sequence, Set, Tuple

import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from ..records.executed_row import ExecutedRow, Part, Pass
from .node_owners import NodeOwners, Owner
from .products import Kind, kind_of, name_of

__all__ = ["Executed", "naming_modules", "unwitnessed"]

_THE_MODEL: Owner = "", "linear"
"""Who runs where no module of the model's does: the model itself, or what calls it."""

_Seen = Tuple[Part, str, Pass, str, Tuple[torch.dtype, ...], Optional[torch.dtype]]
"""The fields of an `ExecutedRow`, as quickly made as an operator is run."""

_now: Any = sys.modules.setdefault("_stability_looks", ModuleType("_stability_looks"))
"""How often looks are `paused`, and modes `entered`, now. Of the process, and not of this module:
a recorded training may import it under two names, and use `stability.shadow` itself."""
for _count in ("paused", "entered"):
    vars(_now).setdefault(_count, 0)


@contextmanager
def unwitnessed() -> Iterator[None]:
    """Inside, nothing is recorded: what an instrument computes is none of the training's.

    The mode is taken off, and not only deaf: where one is on, torch composes some operators
    otherwise (ATen/TensorSubclassLikeUtils.h), and an FP64 norm came out 1 ULP away.
    """
    _now.paused += 1
    try:
        with _disable_current_modes() if _now.entered else nullcontext():
            yield
    finally:
        _now.paused -= 1


class Executed(TorchDispatchMode):
    """A context in which matrix products and attention calls are recorded, with their modules.

    Which module runs is what `naming_modules` tells it. May be entered several times.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self._seen: Set[_Seen] = set()
        self.is_optimizer = False
        self._scope: List[Tuple[Owner, int]] = []
        """The modules and attentions that run, innermost last, and in which graph task each does:
        -1 in a forward pass, another where a backward computes it again."""
        self._owners = NodeOwners()

    @property
    def rows(self) -> List[ExecutedRow]:
        """The distinct operators that were recorded, sorted."""
        named = [(*row[:4], tuple(map(_name, row[4])), _name(row[5])) for row in self._seen]
        return [ExecutedRow(*each) for each in sorted(named)]

    def __enter__(self) -> Executed:
        """Begin to record."""
        _now.entered += 1
        self._owners.begin()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Record no more."""
        _now.entered -= 1
        super().__exit__(*exception)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Leave compiled code compiled: torch would else run it eagerly, with other bits."""
        return True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] = {},
    ) -> Any:
        """Run the operator, and record it if it is a product or an attention."""
        out = func(*args, **(kwargs or {}))
        if _now.paused:
            return out
        kind = kind_of(func)
        if self.is_optimizer:
            if kind is not None:
                self._record(kind, ("", "optimizer"), "update", args, out)
            else:
                self._record_cast(func, args, out)
            return out
        task = _current_graph_task_id()
        if kind is not None:
            self._record(kind, self._claim(task), "forward" if task < 0 else "backward", args, out)
        elif task < 0:
            # a forward's nodes are claimed where who runs changes, once for thousands of operators
            self._owners.leave_for(self._running(task))
        else:
            self._claim(task)
        return out

    def enter(self, name: str, part: Part) -> None:
        """Note that a module or an attention begins to run."""
        task = _current_graph_task_id()
        self._claim(task)
        self._scope.append(((name, part), task))

    def leave(self) -> None:
        """Note that the innermost one ends."""
        self._claim(_current_graph_task_id())
        self._scope.pop()

    def _record(self, kind: Kind, caller: Owner, during: Pass, args: Any, out: Any) -> None:
        (operator, places), (module, part) = kind, caller
        if places is not None:
            multiplied = _flat(args[place] for place in places if place < len(args))
            self._add(part, module, during, operator, multiplied, out)
            return
        if part in ("linear", "unowned"):
            part = "attention"
        self.note(part, module, during, operator, args, out)

    def note(
        self, part: Part, module: str, during: Pass, operator: str, operands: Any, out: Any
    ) -> None:
        """Record one call with those of `operands` that may be of low precision."""
        self._add(part, module, during, operator, filter(_is_number, _flat(operands)), out)

    def _add(
        self,
        part: Part,
        module: str,
        during: Pass,
        operator: str,
        operands: Iterable[Tensor],
        out: Any,
    ) -> None:
        result = out[0] if isinstance(out, (tuple, list)) and out else out
        dtype = result.dtype if isinstance(result, Tensor) else None
        self._seen.add((part, module, during, operator, tuple(x.dtype for x in operands), dtype))

    def _running(self, task: int) -> Owner:
        """Return who calls an operator now, in the graph task `task`."""
        # a module that an outer pass entered does not run the nodes of a backward inside it
        if self._scope and self._scope[-1][1] == task:
            return self._scope[-1][0]
        return _THE_MODEL if task < 0 else self._owners.running(task)

    def _claim(self, task: int) -> Owner:
        """Return who calls an operator now, who also made the nodes since this was last asked."""
        owner = self._running(task)
        self._owners.claim(owner, task)
        return owner

    def _record_cast(self, func: Any, args: Any, out: Any) -> None:
        """Record a cast to a narrower format, as of Muon's iteration, which it makes in BF16."""
        if not (isinstance(out, Tensor) and args and isinstance(args[0], Tensor)):
            return
        before, after = args[0].dtype, out.dtype
        if (
            before.is_floating_point
            and after.is_floating_point
            and after.itemsize < before.itemsize
        ):
            self.note("optimizer", "", "update", name_of(func), args[:1], out)


def _is_number(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex or x.dtype in (torch.int8, torch.uint8)


def _flat(values: Iterable[Any]) -> Iterator[Tensor]:
    """Give the tensors among `values`, and those of lists among them."""
    for value in values:
        yield from (
            x
            for x in (value if isinstance(value, (tuple, list)) else (value,))
            if isinstance(x, Tensor)
        )


@functools.cache
def _name(dtype: Optional[torch.dtype]) -> str:
    return "" if dtype is None else str(dtype).removeprefix("torch.")


@contextmanager
def naming_modules(model: nn.Module, executed: Executed) -> Iterator[None]:
    """Inside, `executed` knows which module of `model` runs; calls of `model` itself have no name.

    Where `model` has a tuple of functions `attention`, as ours have, or of `attention_slots`, whose
    functions a model that is not ours calls, each call of one is recorded with the dtypes of q, k,
    v and out, and what it computes belongs to it.
    """
    handles = []
    for name, module in model.named_modules():
        enter, leave = _hooks(executed, name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    slots = vars(model).get("attention_slots", ())
    functions = None if slots else getattr(model, "attention", None)
    if isinstance(functions, tuple):
        named = [_named(executed, f"layer_{i}.attention", each) for i, each in enumerate(functions)]
        vars(model)["attention"] = tuple(named)
    present = [slot.function for slot in slots]
    for i, slot in enumerate(slots):
        slot.function = _named(executed, f"layer_{i}.attention", slot.function)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if isinstance(functions, tuple):
            vars(model)["attention"] = functions
        for slot, function in zip(slots, present):  # noqa: B905 Python 3.9 has no strict
            slot.function = function


def _hooks(executed: Executed, name: str) -> Tuple[Callable[..., None], Callable[..., None]]:
    def enter(*_: Any) -> None:
        executed.enter(name, "linear")

    def leave(*_: Any) -> None:
        executed.leave()

    return enter, leave


def _named(executed: Executed, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        executed.enter(name, "attention")
        try:
            out = function(*args, **kwargs)
        finally:
            executed.leave()
        if not _now.paused:
            during: Pass = "forward" if _current_graph_task_id() < 0 else "backward"
            executed.note("attention", name, during, "call", args, out)
        return out

    return call
