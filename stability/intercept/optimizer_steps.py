"""Catches the steps of a model's optimizers: `shadow(modules={"optimizer": ...})`.

The candidate is a function of an optimizer, a copy with copies of its parameters, gradients and
state, and makes one update of it, e.g. by another kernel. It is measured by the change that it
makes in the parameters of each group, beside the run's own and one in FP64. Both are differences of
stored weights, so that the rounding of these is in them. Leaves out how a step is repeated
(`probe.optimizer_update`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stability.intercept.module_calls import Noted
from stability.probe.captured_call import is_repeating
from stability.probe.module_candidates import ModuleCandidate
from stability.probe.module_probe import ModuleProbe
from stability.probe.optimizer_update import copy_of

__all__ = ["OPTIMIZER", "OptimizerSteps"]

OPTIMIZER = "optimizer"


class OptimizerSteps:
    """Hands the steps of optimizers of `model` to `probe`; None for a candidate looks at none."""

    def __init__(
        self,
        model: nn.Module,
        candidate: ModuleCandidate | None,
        probe: ModuleProbe,
        noted: Noted,
    ) -> None:
        self.called: set[str] = set()
        self._candidate = candidate
        self._probe = probe
        self._noted = noted
        self._parameters = {id(x) for x in model.parameters()}
        self._known: list[int] = []
        self._before: dict[int, tuple[str, Optimizer]] = {}
        """A copy of each optimizer whose step runs now, as it was."""

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Inside, steps are looked at."""
        if self._candidate is None:
            yield
            return
        # not in the graph of a step that is compiled
        eager: Any = torch.compiler.disable
        handles = [
            register_optimizer_step_pre_hook(eager(self._enter)),
            register_optimizer_step_post_hook(eager(self._leave)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._before.clear()

    def _layer(self, optimizer: Optimizer) -> str:
        if id(optimizer) not in self._known:
            self._known.append(id(optimizer))
        index = self._known.index(id(optimizer))
        return f"{OPTIMIZER}#{index}" if index else OPTIMIZER

    def _enter(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Copy an optimizer that is to step; return its arguments where they are to be others."""
        groups = optimizer.param_groups
        is_ours = any(id(x) in self._parameters for group in groups for x in group["params"])
        if is_repeating() or not is_ours:
            return None
        layer = self._layer(optimizer)
        self.called.add(layer)
        named = self._probe.name_if_due(layer) if self._noted(layer, True) else ""
        if not named:
            return None
        if len(args) > 1 and callable(args[1]):
            return (args[0], self._copies_after(args[1], optimizer, named), *args[2:]), kwargs
        if callable(kwargs.get("closure")):
            closure = self._copies_after(kwargs["closure"], optimizer, named)
            return args, {**kwargs, "closure": closure}
        self._before[id(optimizer)] = named, copy_of(optimizer)
        return None

    def _copies_after(
        self, closure: Callable[[], Any], optimizer: Optimizer, named: str
    ) -> Callable[[], Any]:
        """Return a closure that copies the optimizer once its gradients are there.

        Lightning passes one, which trains; one that is called again is of another algorithm.
        """
        is_called = False

        @wraps(closure)
        def called() -> Any:
            nonlocal is_called
            result = closure()
            if not is_called:
                self._before[id(optimizer)] = named, copy_of(optimizer)
            elif self._before.pop(id(optimizer), None):
                self._probe.find(named, "not looked at: its step calls its closure more than once")
            is_called = True
            return result

        return called

    def _leave(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        layer, before = self._before.pop(id(optimizer), ("", None))
        if before is None or is_repeating():
            return
        assert self._candidate is not None
        with torch.no_grad():
            self._probe.compare_update(layer, self._candidate, before, optimizer)
