"""Tells that the weights are about to be updated, or were and `step()` was not called.

Without that call a session stays at its step: what follows would be taken for more of it. An update
is known by torch's hook on the steps of all optimizers, and one that no optimizer makes by the
version counter of the parameters that it writes into; both without waiting for a device. Leaves out
which calls are looked at (`session`), and weights that are changed through `.data`.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from stability.probe.captured_call import is_repeating, version_of

__all__ = ["FORGOTTEN", "UpdateWatch"]

FORGOTTEN = (
    "the weights were updated and step() was not called since; call it on what shadow yields "
    "after each update: without it no further step is looked at"
)


class UpdateWatch:
    """Knows whether the weights of `model` have changed since the last mark."""

    def __init__(
        self,
        model: nn.Module,
        find: Callable[[str, str], None],
        before: Callable[[], None] | None = None,
    ) -> None:
        self._model = model
        self._before = before
        """Is called before an optimizer changes the weights."""
        self._find = find
        """Is given the layer and the text of a finding."""
        self._was_told = False
        self._ours: WeakSet[Optimizer] = WeakSet()
        """Known optimizers of the model's weights."""
        self._stepped: WeakSet[Optimizer] = WeakSet()
        """Those that have made an update since `step()` was called."""
        self.mark()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """See the steps of optimizers inside."""
        # a step that is compiled would have them in its graph, and one graph for each state of this
        eager: Any = torch.compiler.disable
        handles = [
            register_optimizer_step_pre_hook(eager(self._expect_update)),
            register_optimizer_step_post_hook(eager(self._note_update)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def mark(self) -> None:
        """Take the weights as they are now for those of the step."""
        # these very ones: in a pass of its own FSDP puts gathered weights in their place
        self._parameters = list(self._model.parameters())
        self._version = self._sum_of_versions()
        self._has_stepped = False

    def announce(self) -> None:
        """Take note that `step()` was called."""
        self._stepped.clear()

    @property
    def has_seen_one(self) -> bool:
        """Whether the weights were updated since the last mark."""
        return self._has_stepped or self._sum_of_versions() != self._version

    def warn(self) -> None:
        """Mark, and tell of it the first time."""
        self.mark()
        if not self._was_told:
            self._was_told = True
            # beyond this, the session's method and who has called it
            warnings.warn(f"shadow: {FORGOTTEN}", stacklevel=3)
            self._find("model", FORGOTTEN)

    def _expect_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._before is not None and not is_repeating() and self._is_ours(optimizer):
            self._before()

    def _note_update(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if is_repeating() or not self._is_ours(optimizer):
            return
        if optimizer in self._stepped:  # also where no step is due, and no call is seen
            self.warn()
        self._stepped.add(optimizer)
        # a fused update moves no version
        self._has_stepped = True

    def _is_ours(self, optimizer: Optimizer) -> bool:
        if optimizer not in self._ours:
            own = set(map(id, self._model.parameters()))
            if own.isdisjoint(id(x) for group in optimizer.param_groups for x in group["params"]):
                return False
            self._ours.add(optimizer)
        return True

    def _sum_of_versions(self) -> int:
        return sum(version_of(parameter) for parameter in self._parameters)
