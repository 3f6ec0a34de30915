"""What torch really executed: the dtypes of matrix products and of attention calls, by module.

A `TorchDispatchMode` sees each operator below autocast and autograd, so with the operands as they
were multiplied, whatever a config calls its precision. A product is told by the module whose
forward made it; one of the backward pass by the forward call that its autograd node came from. The
mode runs each operator as it is and looks at dtypes alone, so no bit depends on it; code that
torch.compile has compiled runs compiled (`ignore_compile_internals`) and is not seen.

Leaves out what a kernel does inside one operator (a switch may round the operands there:
`known_answers`), and what follows from it all (`records.witness`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from stability.records.witness import ExecutedRow, Part, Pass

__all__ = ["Executed", "naming_modules", "unwitnessed"]

MATMULS: dict[str, slice] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "matmul", "linear"), slice(0, 2)),
    **dict.fromkeys(("_scaled_mm", "_grouped_mm", "_scaled_grouped_mm", "_int_mm"), slice(0, 2)),
    **dict.fromkeys(("convolution", "mkldnn_linear", "_thnn_fused_lstm_cell"), slice(0, 2)),
    "convolution_backward": slice(0, 3),
    # the first argument is added to the product
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), slice(1, 3)),
}
"""The operators of ATen that multiply matrices, and which of their arguments they multiply."""

FUSED = ("_scaled_dot_product_", "_flash_attention_", "_efficient_attention_", "_cudnn_attention_")
"""How the names of ATen's fused attentions begin."""

_NOT_OF_INTEREST = ("aten", "prim", "prims", "profiler", "c10d", "_c10d_functional")
"""Namespaces whose other operators are neither products nor attentions; any other namespace is a
library's own, whose operators are recorded as they were called."""

_paused = _entered = 0


@contextmanager
def unwitnessed() -> Iterator[None]:
    """Inside, nothing is recorded: what an instrument computes is none of the training's.

    The mode is taken off, and not only deaf: where one is on, torch composes some operators
    otherwise (ATen/TensorSubclassLikeUtils.h), and an FP64 norm came out 1 ULP away.
    """
    global _paused
    _paused += 1
    try:
        with _disable_current_modes() if _entered else nullcontext():
            yield
    finally:
        _paused -= 1


class Executed(TorchDispatchMode):
    """A context in which matrix products and attention calls are recorded, with their modules.

    `scope` is the module that runs now, as `naming_modules` sets it. May be entered several times.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.rows: Counter[ExecutedRow] = Counter()
        self.scope: list[tuple[str, Part]] = []
        """The modules and attentions that are running, innermost last, and what part each is."""
        self.is_optimizer = False
        self._owners: dict[int, tuple[str, Part]] = {}
        """Who called an operator in the forward pass, by the number of its autograd node."""

    def __enter__(self) -> "Executed":
        """Begin to record."""
        global _entered
        _entered += 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Record no more."""
        global _entered
        _entered -= 1
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
        if not _paused:
            kind = _kind(func)
            if kind is not None:
                self._record(func, kind, args, out)
            elif self.is_optimizer:
                self._record_cast(func, args, out)
        return out

    def _record(self, func: Any, kind: "tuple[str, slice] | str", args: Any, out: Any) -> None:
        operator = kind if isinstance(kind, str) else kind[0]
        operands = args if isinstance(kind, str) else args[kind[1]]
        (module, part), during = self._caller()
        if isinstance(kind, str) and part == "linear":
            part = "attention"
        self.note(part, module, during, operator, operands, out)

    def note(
        self, part: Part, module: str, during: Pass, operator: str, operands: Any, out: Any
    ) -> None:
        """Count one call."""
        dtypes = tuple(_dtype(x) for x in operands if isinstance(x, Tensor) and _is_number(x))
        result = out[0] if isinstance(out, tuple | list) and out else out
        row = ExecutedRow(
            part=part,
            module=module,
            during=during,
            operator=operator,
            operands=dtypes,
            result=_dtype(result) if isinstance(result, Tensor) else "",
        )
        self.rows[row] += 1

    def _caller(self) -> tuple[tuple[str, Part], Pass]:
        if self.is_optimizer:
            return ("", "optimizer"), "update"
        node = torch._C._current_autograd_node()
        if node is not None:
            # without an owner it is a node that was made before, or by another thread
            return self._owners.get(node._sequence_nr(), ("", "linear")), "backward"
        caller = self.scope[-1] if self.scope else ("", "linear")
        # the node of this very call is the last one made: autograd makes it before it dispatches
        self._owners.setdefault(_get_sequence_nr() - 1, caller)
        return caller, "forward"

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
            self.note("optimizer", "", "update", _name(func), args[:1], out)


def _is_number(x: Tensor) -> bool:
    return x.dtype.is_floating_point or x.dtype.is_complex or x.dtype in (torch.int8, torch.uint8)


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def _name(func: Any) -> str:
    return func._schema.name if hasattr(func, "_schema") else str(func.name())


_kinds: dict[Any, "tuple[str, slice] | str | None"] = {}


def _kind(func: Any) -> "tuple[str, slice] | str | None":
    """Return a product's name and operands, an attention's or a library's name, or None."""
    try:
        return _kinds[func]
    except KeyError:
        _kinds[func] = found = _find_kind(func)
        return found


def _find_kind(func: Any) -> "tuple[str, slice] | str | None":
    namespace, _, name = _name(func).rpartition("::")
    if namespace == "aten" and name in MATMULS:
        return _name(func), MATMULS[name]
    if namespace == "aten" and name.startswith(FUSED):
        return _name(func)
    # SDPA's math path has no operator of its own: this softmax is called nowhere else
    if namespace == "aten" and name == "_safe_softmax":
        return _name(func)
    return None if namespace in _NOT_OF_INTEREST else _name(func)


@contextmanager
def naming_modules(model: nn.Module, executed: Executed) -> Iterator[None]:
    """Inside, `executed` knows which module of `model` runs; calls of `model` itself have no name.

    Where `model` has a tuple of functions `attention`, as our GPT, each call of one is recorded
    with the dtypes of q, k, v and out, and what it computes belongs to it.
    """
    handles = []
    for name, module in model.named_modules():
        enter, leave = _hooks(executed, name)
        handles.append(module.register_forward_pre_hook(enter))
        handles.append(module.register_forward_hook(leave, always_call=True))
    functions = getattr(model, "attention", None)
    if isinstance(functions, tuple):
        named = [_named(executed, f"layer_{i}.attention", each) for i, each in enumerate(functions)]
        vars(model)["attention"] = tuple(named)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        if isinstance(functions, tuple):
            vars(model)["attention"] = functions


def _hooks(executed: Executed, name: str) -> tuple[Callable[..., None], Callable[..., None]]:
    def enter(*_: Any) -> None:
        executed.scope.append((name, "linear"))

    def leave(*_: Any) -> None:
        executed.scope.pop()

    return enter, leave


def _named(executed: Executed, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        executed.scope.append((name, "attention"))
        try:
            out = function(*args, **kwargs)
        finally:
            executed.scope.pop()
        if not _paused:
            executed.note("attention", name, "forward", "call", args, out)
        return out

    return call
