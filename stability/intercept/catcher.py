"""One open catch of a model's attention calls: which module runs, and to whom its calls are handed.

Every way to catch calls, a door, asks here whether a call is one of this model's, what its layer is
called, and hands it over. A call that is made inside a caught one, as SDPA inside an attention
function of transformers, belongs to it and is not caught again. What runs is kept for each thread,
and hooks are torch's global ones: nothing is put on the model, so a copy of it carries nothing.
Leaves out the doors (`sdpa`, `transformers`, ...) and what is done with a call (`probe`).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from threading import Lock, local
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.utils.hooks import RemovableHandle

from stability.intercept.layer_names import layer_names
from stability.probe.captured_call import AttentionCall, BoundAttention, CallHandler, is_repeating

__all__ = ["Catcher", "Door", "newest_catcher"]

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
        self.modes: list[AbstractContextManager[Any]] = []
        """What is entered while the model runs, in this thread alone."""


class Catcher:
    """Knows which module of `model` runs in each thread, and hands calls to `handler`."""

    def __init__(self, model: nn.Module, handler: CallHandler) -> None:
        self.model = model
        self.names = layer_names(model)
        self.modes: list[Callable[[], AbstractContextManager[Any]]] = []
        """Made and entered in a thread when its forward pass begins, and left when it ends."""
        self.checks: list[Callable[[nn.Module], None]] = []
        """Called with the model when a forward pass begins; what they raise ends it."""
        self.ran: set[nn.Module] = set()
        """The modules that have run while it was open."""
        self._handler = handler
        self._thread = _Thread()
        self._is_open = False
        self._lock = Lock()
        self._passes = 0
        """How many threads run a forward pass of the model now."""
        self._hooks: list[RemovableHandle] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, it is known which module runs; to be entered once."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        self._is_open = True
        _OPEN.append(self)
        try:
            yield
        finally:
            self._is_open = False
            _OPEN.remove(self)
            self._end_pass()
            self._remove_hooks()

    @property
    def may_catch(self) -> bool:
        """Whether a call that this thread makes now is one to hand over."""
        thread = self._thread
        return bool(self._is_open and thread.running and not thread.caught and not is_repeating())

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
        name = self.running_layer() if module is None else self.names[module]
        calls = self._thread.calls
        count = calls[name] = calls.get(name, -1) + 1
        return f"{name}#{count}" if count else name

    def hand_over(self, call: AttentionCall, primary: BoundAttention) -> Tensor:
        """Return what the handler makes of a call."""
        trains = torch.is_grad_enabled() and self.model.training
        self._thread.caught += 1
        try:
            return self._handler(replace(call, trains=trains), primary)
        finally:
            self._thread.caught -= 1

    def _enter(self, module: nn.Module, args: Any) -> None:
        """Count a module in, as the forward pre-hook of every module there is."""
        if torch.compiler.is_compiling() or module not in self.names:
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
        if torch.compiler.is_compiling():
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
        self._remove_hooks()

    def _remove_hooks(self) -> None:
        # a pass of another thread still has to leave its modes, and only it can: they are its own
        with self._lock:
            if self._is_open or self._passes:
                return
            while self._hooks:
                self._hooks.pop().remove()
