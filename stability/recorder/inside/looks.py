"""Looks at a few updates of a training: what its modules and optimizers multiply, in which dtypes.

A look is the mode of `probe.executed` from the first module that is called with gradients to the
end of the backward pass, again for each micro-batch, and from the begin of an optimizer's step to
its end: loading data and clipping are not looked at. Modules and backward passes have hooks in an
update that is looked at, and in no other.

Compiled code is never run in a look, since torch would run some of it eagerly: where the process
has called `torch.compile`, nothing is looked at, and that is said. Neither is an update in which
the script has a dispatch mode of its own on. Leaves out what else a witness tells (`witness`).
"""

from __future__ import annotations

import functools
import sys
from threading import get_ident
from typing import Any, Callable, Dict, List, Tuple

import torch
from torch import nn
from torch._C import _current_graph_task_id
from torch.nn import functional
from torch.nn.modules import module as hooks_of_modules
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils._python_dispatch import (
    _get_current_dispatch_mode_stack,
    _pop_mode,
    _push_mode,
)

from .module_names import names_of_modules
from .older_torch import is_compiling
from .patching import put
from .planned import is_due
from .training import Training

__all__ = ["FIRST_LOOKS", "Looks", "is_looked_at"]

FIRST_LOOKS = 2
"""Updates looked at where a training begins, or a stretch of one: the first may be one that a loss
scaler skips, or one in which libraries choose their code."""

_COMPILED = "torch.compile was called, and what a compiled graph multiplies is not seen"


def is_looked_at(update: int, last: int = 0) -> bool:
    """Whether the update after `update` others is looked at; `last` is how many are planned."""
    return update < FIRST_LOOKS or is_due(update + 1) or update + 1 == last


class Looks:
    """The looks at one process's part of `training`.

    `executed` is the class of the mode, since the module that has it may have another name here;
    `due` says by an update's number, from 0, whether it is looked at.
    """

    def __init__(self, training: Training, executed: Any, due: Callable[[int], bool]) -> None:
        self.steps: List[int] = []
        """The updates that were looked at, counted from 0."""
        self.unproven = ""
        """Why no more is looked at; empty as long as nothing was in the way."""
        self._training, self._due = training, due
        self._executed = executed()
        self._update = 0
        self._names: Dict[int, str] = {}
        """Those of modules that were called in this update, by their place in memory."""
        self._hooks: List[Callable[[], None]] = []
        """What takes out again the hooks that stay while there are looks."""
        self._undone: List[Callable[[], None]] = []
        """What takes the hooks of this update out again."""
        self._is_on = self._was_on = False
        """Whether the mode is on, and whether it has been in this update."""
        self._thread = 0
        self._entered: List[Tuple[int, str]] = []
        """The modules that run, and their names, innermost last."""
        self._stepping = 0
        """How many steps of optimizers run, one inside another."""
        self._is_hidden = False

    @property
    def rows(self) -> List[List[Any]]:
        """The distinct operators that were seen, as JSON values."""
        return [row.values for row in self._executed.rows]

    def begin(self) -> None:
        """Look at the first update, and hear of `torch.compile`."""
        self._hooks = [
            put(torch, "compile", self._heard_compile(torch.compile)),
            # these stay: a step that closes an update may not change the hooks that it runs
            register_optimizer_step_pre_hook(self._guarded(self._step_begins)).remove,
            register_optimizer_step_post_hook(self._guarded(self._step_ends)).remove,
        ]
        self._training.when_update_ends = self._update_ends
        self._arm()

    def end(self) -> None:
        """Leave no mode and no hook behind."""
        self._training.when_update_ends = lambda made: None
        self._disarm()
        while self._hooks:
            self._hooks.pop()()
        if not self.steps and self._is_hidden and not self.unproven:
            self.unproven = "the script has a dispatch mode of its own on wherever one would look"

    def _update_ends(self, made: int) -> None:
        self._disarm()
        self._update = made
        self._arm()

    def _arm(self) -> None:
        if not self.unproven and _has_compiled():
            self.unproven = _COMPILED
        if self.unproven or not self._due(self._update):
            return
        of_calls = hooks_of_modules
        after = of_calls.register_module_forward_hook(self._guarded(self._leaves), always_call=True)
        self._undone = [
            of_calls.register_module_forward_pre_hook(self._guarded(self._enters)).remove,
            after.remove,
            put(torch.autograd, "backward", self._looking_backward(torch.autograd.backward)),
            put(
                functional,
                "scaled_dot_product_attention",
                self._looking_at_attention(functional.scaled_dot_product_attention),
            ),
        ]

    def _disarm(self) -> None:
        self._switch_off()
        if self._was_on and not self.unproven:
            self.steps.append(self._update)
        self._was_on, self._stepping = False, 0
        while self._undone:
            self._undone.pop()()
        self._names.clear()

    def _give_up(self, why: str) -> None:
        """Look no more; hooks that may run now are taken out where the update ends."""
        self.unproven = why
        self._switch_off()

    def _guarded(self, then: Callable[..., None]) -> Callable[..., None]:
        """Return a hook that a compiler does not see, and whose failure harms no training."""

        def hook(*args: Any) -> None:
            if is_compiling() or not self._undone or self.unproven:
                return
            if self._training.looks_away:  # an instrument computes: none of it is the training's
                return
            try:
                then(*args)
            except Exception as error:
                self._give_up(f"a look failed: {type(error).__name__}: {error}")

        return hook

    def _switch_on(self, *, is_optimizer: bool) -> None:
        if not self._is_on:
            if _get_current_dispatch_mode_stack():
                self._is_hidden = True  # the script's own takes off the uppermost when it ends
                return
            self._thread = get_ident()
            self._executed.__enter__()
            self._is_on = self._was_on = True
        self._executed.is_optimizer = is_optimizer

    def _switch_off(self) -> None:
        if not self._is_on:
            return
        while self._entered:
            self._entered.pop()
            self._executed.leave()
        above = []
        while _get_current_dispatch_mode_stack()[-1:] not in ([], [self._executed]):
            above.append(_pop_mode())
        if _get_current_dispatch_mode_stack():
            self._executed.__exit__(None, None, None)
        elif not self.unproven:
            self.unproven = "a look began in one thread, and ended in another"
        for mode in reversed(above):
            _push_mode(mode)
        self._is_on = self._executed.is_optimizer = False

    def _enters(self, module: nn.Module, *_: Any) -> None:
        is_backward = _current_graph_task_id() != -1
        # a copy of a model on another GPU runs in a thread of its own
        if self._is_on and not is_backward and get_ident() != self._thread:
            return
        is_model = self._is_on and not self._executed.is_optimizer
        if not is_model and not is_backward and torch.is_grad_enabled() and self._trains(module):
            self._switch_on(is_optimizer=False)
        if self._is_on and not self._executed.is_optimizer:
            self._enter(id(module), self._name_of(module), "linear")

    def _trains(self, module: nn.Module) -> bool:
        # without a start state there is no optimizer yet: it may be no call of the training
        return bool(self._training.state) and any(x.requires_grad for x in module.parameters())

    def _name_of(self, module: nn.Module) -> str:
        if id(module) not in self._names:
            self._names.update(names_of_modules(module, self._training.state))
        return self._names[id(module)] or self._innermost

    @property
    def _innermost(self) -> str:
        return self._entered[-1][1] if self._entered else ""

    def _leaves(self, module: nn.Module, *_: Any) -> None:
        self._leave(id(module))

    def _enter(self, key: int, name: str, part: str) -> None:
        self._executed.enter(name, part)
        self._entered.append((key, name))

    def _leave(self, key: int) -> None:
        # what began before the mode was on has no place in the list
        if self._entered and self._entered[-1][0] == key:
            self._entered.pop()
            self._executed.leave()

    def _step_begins(self, *_: Any) -> None:
        self._stepping += 1
        # a step that is given its forward and backward pass as a closure computes these first
        if self._was_on:
            self._switch_on(is_optimizer=True)

    def _step_ends(self, *_: Any) -> None:
        self._stepping = max(self._stepping - 1, 0)
        if not self._stepping:
            self._switch_off()

    def _gradients_are_there(self) -> None:
        if self._stepping:
            self._switch_on(is_optimizer=True)
        else:
            self._switch_off()

    def _looking_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            if is_compiling() or not self._undone or _current_graph_task_id() != -1:
                return original(*args, **kwargs)
            if self._was_on:  # the second one of two losses finds the mode off
                self._guarded(lambda: self._switch_on(is_optimizer=False))()
            try:
                return original(*args, **kwargs)
            finally:
                self._guarded(self._gradients_are_there)()

        return backward

    def _looking_at_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def attend(*args: Any, **kwargs: Any) -> Any:
            is_seen = self._is_on and not self._executed.is_optimizer
            if not is_seen or is_compiling():
                return original(*args, **kwargs)
            key = id(original)
            self._guarded(lambda: self._enter(key, self._innermost, "attention"))()
            try:
                return original(*args, **kwargs)
            finally:
                self._guarded(lambda: self._leave(key))()

        return attend

    def _heard_compile(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def compiles(*args: Any, **kwargs: Any) -> Any:
            if not kwargs.get("disable") and not self.unproven:
                self._give_up(_COMPILED)
                self._disarm()  # at once: a graph must not find a hook
            return original(*args, **kwargs)

        return compiles


def _has_compiled() -> bool:
    """Whether anything was handed to dynamo in this process, before or in spite of our hearing."""
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    known = getattr(dynamo, "cached_backends", {})
    return any(callable(backend) for backend in known.values())  # what disables it has none
