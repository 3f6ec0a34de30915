"""One open catch of a model's attention calls: which module runs, and to whom its calls are handed.

Every way to catch calls, a door, asks here whether a call is one of this model's, what its layer is
called, and hands it over. A call that is made inside a caught one, as SDPA inside an attention
function of transformers, belongs to it and is not caught again. What runs is kept for each thread,
and hooks are torch's global ones: nothing is put on the model, so a copy of it carries nothing.
While a thread runs compiled code nothing of this lies around it, and nothing is caught there.
Leaves out the doors (`sdpa`, `transformers`, ...) and what is done with a call (`probe`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from threading import Lock, get_ident, local
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import (
    _len_torch_function_stack,
    _pop_torch_function_stack,
    _push_on_torch_function_stack,
)
from torch.overrides import TorchFunctionMode

from stability.intercept.compiled_code import (
    ComeBack,
    is_in_compiled_code,
    stepping_aside,
    while_nothing_compiles,
)
from stability.intercept.global_hooks import put_global_hooks
from stability.intercept.layer_names import layer_names
from stability.probe.captured_call import AttentionCall, BoundAttention, CallHandler, is_repeating

__all__ = [
    "Catcher",
    "Door",
    "is_in_caught_call",
    "newest_catcher",
    "put_mode_below",
    "transform_around",
]

Door = Callable[["Catcher"], AbstractContextManager[None]]
"""A way to catch calls: inside the context they go to the catcher."""


_OPEN: list["Catcher"] = []
"""All that are open, of any model, in the order in which they were opened."""


def newest_catcher(module: nn.Module | None = None) -> "Catcher | None":
    """Return who is to be handed a call that this thread makes now, None if nobody is.

    With `module`, only one of whose model that is a part. Where several are open the newest comes
    first; its primary makes the call again, which then is the next one's.
    """
    for catcher in reversed(tuple(_OPEN)):
        if not catcher.takes_attention:
            continue
        if catcher.may_catch and (module is None or catcher.knows(module)):
            return catcher
    return None


class _Thread(local):
    """What one thread runs of the model."""

    def __init__(self) -> None:
        self.running: list[nn.Module] = []
        """Innermost last."""
        self.calls: dict[str, int] = {}
        """How often each layer has attended in this forward pass before its latest call."""
        self.caught = 0
        """How many caught calls run now, each inside the one before."""
        self.modes: list[TorchFunctionMode] = []
        """What is entered while the model runs, in this thread alone."""


class _Caught(local):
    depth = 0


_CAUGHT = _Caught()


def is_in_caught_call() -> bool:
    """Whether this thread makes a call that some catcher has handed over."""
    return _CAUGHT.depth > 0


class Catcher:
    """Knows which module of `model` runs in each thread, and hands attention calls to `handler`.

    Without a handler it is handed none.
    """

    def __init__(self, model: nn.Module, handler: CallHandler | None) -> None:
        self.model = model
        self.names = layer_names(model)
        self.modes: list[Callable[[], TorchFunctionMode | None]] = []
        """Made and entered in a thread when its forward pass begins, and left when it ends."""
        self.everywhere: list[Callable[[], Callable[[], None]]] = [
            partial(put_global_hooks, self._enter, self._leave)
        ]
        """Each puts something there for the whole process, and returns what takes it away."""
        self.checks: list[Callable[[nn.Module], None]] = []
        """Called with the model when a forward pass begins; what they raise ends it."""
        self.ran: set[nn.Module] = set()
        """The modules that have run while it was open, but for those inside compiled code."""
        self.met_compiled_code = False
        """Whether anything compiled has run while it was open."""
        self.takes_attention = handler is not None
        self._handler = handler
        self._thread = _Thread()
        self._is_open = False
        self._lock = Lock()
        self._opener = 0
        """The thread that has opened it."""
        self._passes = 0
        """How many threads run a forward pass of the model now, and are not in compiled code."""
        self._aside = 0
        """How many threads are in compiled code, of the one that has opened it."""
        self._take_away: list[Callable[[], None]] = []
        """Takes away what was put everywhere; empty where nothing is."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it is known which module runs; to be entered once."""
        self._is_open = True
        self._opener = get_ident()
        _OPEN.append(self)
        try:
            self._put_or_take_away()
            with stepping_aside(self._step_aside):
                yield
        finally:
            self._is_open = False
            _OPEN.remove(self)
            self._end_pass()
            self._put_or_take_away()

    @property
    def may_catch(self) -> bool:
        """Whether a call that this thread makes now is one to hand over."""
        thread = self._thread
        if not self._is_open or not thread.running or thread.caught:
            return False
        return not is_repeating() and not is_in_compiled_code()

    def running_layer(self) -> str:
        """Return the path of the innermost module that runs in this thread."""
        return self.names[self._thread.running[-1]]

    def knows(self, module: nn.Module) -> bool:
        """Whether `module` is one of the model's."""
        return module in self.names

    def next_layer(self, module: nn.Module | None = None) -> str:
        """Return the layer of a call: the path of the module, else of the innermost that runs.

        The second call of a module in one forward pass has `#1` behind it, and so on.
        """
        return self.numbered(self.running_layer() if module is None else self.names[module])

    def numbered(self, name: str) -> str:
        """Return `name` with `#1` behind it at its second call since a forward pass has begun."""
        calls = self._thread.calls
        count = calls[name] = calls.get(name, -1) + 1
        return f"{name}#{count}" if count else name

    def hand_over(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        """Return what the handler makes of a call."""
        assert self._handler is not None
        trains = torch.is_grad_enabled() and self.model.training
        unsupported = call.unsupported or transform_around()
        self._thread.caught += 1
        _CAUGHT.depth += 1
        try:
            return self._handler(replace(call, trains=trains, unsupported=unsupported), primary)
        finally:
            self._thread.caught -= 1
            _CAUGHT.depth -= 1

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Count a module in, as the forward pre-hook of every module there is."""
        if torch.compiler.is_dynamo_compiling() or module not in self.names:
            return  # a graph is to be what it is without this
        thread = self._thread
        if module is self.model and thread.running:
            # an interrupt (KeyboardInterrupt) skips forward hooks: its pass has ended all the same
            self._end_pass()
        # A forward pass begins with the outermost module. So does a recomputation of a checkpointed
        # layer in the backward pass, whose calls thereby keep their names.
        if not thread.running:
            if not self._is_open:
                return
            self._begin_pass()
        thread.running.append(module)
        self.ran.add(module)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        """Count a module out, as the forward hook of every module, after an error too."""
        if torch.compiler.is_dynamo_compiling():
            return
        running = self._thread.running
        if module not in self.names or module not in running:
            return
        # modules inside it that an interrupt has ended are out as well
        place = len(running) - 1 - running[::-1].index(module)
        if place:
            del running[place:]
        else:
            self._end_pass()

    def _begin_pass(self) -> None:
        thread = self._thread
        for check in self.checks:
            check(self.model)
        with self._lock:
            self._passes += 1
        thread.calls.clear()
        for make in self.modes:
            mode = make()
            if mode is not None:
                mode.__enter__()
                thread.modes.append(mode)

    def _end_pass(self) -> None:
        thread = self._thread
        if not thread.running:
            return
        thread.running.clear()
        while thread.modes:
            thread.modes.pop().__exit__(None, None, None)
        with self._lock:
            self._passes -= 1
        self._put_or_take_away()

    def _step_aside(self) -> ComeBack:
        """Take away what compiled code would meet, as this thread enters it."""
        if not is_repeating() and not is_in_caught_call():
            self.met_compiled_code = True
        is_in_pass = bool(self._thread.running)
        # where it is another that trains, who runs the model elsewhere is to be seen: there the
        # hooks stay, for which Dynamo compiles the same graph again
        is_opener = get_ident() == self._opener
        put_modes_back = _take_modes_away(self._thread.modes)
        with self._lock:
            self._aside += is_opener
            self._passes -= is_in_pass
        self._put_or_take_away()

        def come_back(module: nn.Module | None) -> Callable[[], None]:
            with self._lock:
                self._aside -= is_opener
                self._passes += is_in_pass
            self._put_or_take_away()
            put_modes_back()
            if module is None:
                return lambda: None
            # compiled code has called it, and no hook
            self._enter(module, ())
            return partial(self._leave, module, (), None)

        return come_back

    def _put_or_take_away(self) -> None:
        # a pass of another thread still has to leave its modes, and only it can: they are its own
        with while_nothing_compiles(), self._lock:
            if self._passes or (self._is_open and not self._aside):
                if not self._take_away:
                    self._take_away = [put() for put in self.everywhere]
                return
            while self._take_away:
                self._take_away.pop()()


def put_mode_below(mode: TorchFunctionMode) -> Callable[[], None]:
    """Put `mode` under all others of this thread, and return what takes it away again.

    So others may be entered and left in their own order meanwhile.
    """
    before = _taken_off()
    for one in (mode, *before):
        _push_on_torch_function_stack(one)

    def take_away() -> None:
        _take_modes_away([mode])

    return take_away


def transform_around() -> str:
    """Return that torch.func runs, if it does: what its tensors hide can't be repeated."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    if functorch.peek_interpreter_stack() is None:
        return ""
    return "made inside torch.func (vmap, grad, jvp); run the model outside of it, and backward()"


def _take_modes_away(modes: Sequence[TorchFunctionMode]) -> Callable[[], None]:
    """Take `modes` out of this thread's stack, and return what makes it what it was."""
    if not modes:
        return lambda: None
    before = _taken_off()
    for mode in before:
        if not any(mode is one for one in modes):
            _push_on_torch_function_stack(mode)

    def put_back() -> None:
        _taken_off()
        for mode in before:
            _push_on_torch_function_stack(mode)

    return put_back


def _taken_off() -> list[Any]:
    """Empty this thread's stack of modes, and return them, outermost first."""
    count = _len_torch_function_stack()
    return [_pop_torch_function_stack() for _ in range(count)][::-1]
