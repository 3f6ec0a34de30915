"""Catches the cross-entropy of a training step, alone or as one with the layer that feeds it.

`shadow(modules={"loss": ...})` looks at the call of `torch.nn.functional.cross_entropy` wherever
the loop makes it, `"lm_head+loss"` at the two calls in a row: what a fused linear cross-entropy
computes in one. Its candidate is called as `function(lm_head, hidden, targets)`, hidden flattened
to `(tokens, width)` where the logits are `(tokens, classes)`, with the options of the call that are
no defaults, e.g. `ignore_index=-1`, and returns the loss. Between the two calls the logits may be
cast, reshaped, and lose the last position of each sequence; a call whose logits are otherwise not
those of the layer is not looked at, which is a finding. Leaves out modules as such (`module_calls`)
and losses of other names.
"""

import inspect
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from stability.intercept.catcher import put_mode_below
from stability.intercept.global_hooks import put_global_hooks
from stability.intercept.layer_names import layer_names
from stability.intercept.module_calls import ModuleCalls
from stability.probe.captured_call import is_repeating
from stability.probe.module_call import autocast_now
from stability.probe.module_candidates import ModuleCandidate

__all__ = ["LOSS", "LossCalls", "is_of_loss"]

LOSS = "loss"
_HEADS = 8
"""As many calls of heads wait for their loss, e.g. of one that predicts several tokens; beyond
them, as where a layer gives no logits for a loss, the oldest is forgotten."""
_OTHER_LOGITS = (
    "not looked at: the logits that the loss was given are not those of {}, cast, reshaped or less "
    "the last position"
)


def is_of_loss(key: str) -> bool:
    """Whether a key of `modules` means a loss, alone or behind a layer."""
    return key == LOSS or key.endswith(f"+{LOSS}")


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    """A layer that gave logits, what it was given, what it gave, and its autocast."""

    module: nn.Module
    inputs: tuple[Any, ...]
    out: Tensor
    autocast: torch.dtype | None


class LossCalls:
    """Hands the calls of cross-entropy that `candidates` mean, by key, to a `ModuleProbe`."""

    def __init__(
        self, model: nn.Module, candidates: Mapping[str, ModuleCandidate], calls: ModuleCalls
    ) -> None:
        self._candidates = candidates
        self._calls = calls
        heads = [key.removesuffix(f"+{LOSS}") for key in candidates if key != LOSS]
        self._heads = {
            module: name
            for module, name in layer_names(model).items()
            if any(fnmatchcase(name, glob) for glob in heads)
        }
        self._latest: deque[_Head] = deque(maxlen=_HEADS)
        """Those whose logits no loss was given yet, the newest last."""

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Inside, calls that this thread makes are looked at."""
        if not self._candidates:
            yield
            return
        remove_hooks = put_global_hooks(lambda *_: None, self._after)
        take_away = put_mode_below(_SeesCrossEntropy(self._call))
        try:
            yield
        finally:
            take_away()
            remove_hooks()
            self._latest.clear()

    def _after(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if module in self._heads and isinstance(out, Tensor) and not is_repeating():
            self._latest.append(_Head(module, args, out.detach(), autocast_now([out])))

    def _call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compute the loss as the run does, and capture the call if it is looked at."""
        given = inspect.signature(F.cross_entropy).bind(*args, **kwargs).arguments
        logits, targets = given.pop("input"), given.pop("target")
        defaults = inspect.signature(F.cross_entropy).parameters
        options = {
            name: x
            for name, x in given.items()
            if isinstance(x, Tensor) or x != defaults[name].default
        }
        if not isinstance(logits, Tensor) or not logits.requires_grad:
            return F.cross_entropy(*args, **kwargs)
        alone, fused = self._candidates.get(LOSS), None
        if self._latest:
            head = self._head_of(logits)
            self._latest.remove(head)
            fused = self._fused(head, logits, targets, options)
        layer = self._calls.numbered(LOSS)
        entered = self._calls.enter(layer, None, (logits, targets)) if alone else None
        loss = F.cross_entropy(*args, **kwargs)
        if alone and entered:
            own = F.cross_entropy
            self._calls.leave(entered, alone, own, own, ((logits, targets), options), loss)
        if fused:
            fused(loss)
        return loss

    def _head_of(self, logits: Tensor) -> _Head:
        """Return whose logits these are, the newest layer if they are none's."""
        newest = self._latest[-1]
        if len(self._latest) == 1:
            return newest
        found = (one for one in self._latest if _hidden_of(one.inputs, one.out, logits) is not None)
        return next(found, newest)

    def _fused(
        self,
        head: _Head,
        logits: Tensor,
        targets: Tensor,
        options: Mapping[str, Any],
    ) -> Callable[[Tensor], None] | None:
        """Return what captures the two calls in a row, once the loss is there."""
        name = self._heads[head.module]
        layer = self._calls.numbered(f"{name}+{LOSS}")
        candidate = next(
            one
            for key, one in self._candidates.items()
            if key != LOSS and fnmatchcase(name, key.removesuffix(f"+{LOSS}"))
        )
        entered = self._calls.enter(layer, head.module, (*head.inputs, targets))
        if entered is None:
            return None
        hidden = _hidden_of(head.inputs, head.out, logits)
        if hidden is None:
            self._calls.find(layer, _OTHER_LOGITS.format(name))
            return None
        if logits.dim() == 2:
            hidden = hidden.flatten(0, -2)
        # the layer runs under its own autocast, and so does the candidate: it computes the logits
        own = partial(_head_and_loss, logits.dtype, entered.autocast)
        entered = replace(entered, autocast=head.autocast)
        return partial(self._calls.leave, entered, candidate, own, _x, ((hidden, targets), options))


def _hidden_of(inputs: tuple[Any, ...], out: Tensor, logits: Tensor) -> Tensor | None:
    """Return what gave `logits`: the layer's input, less the last position if that was dropped."""
    if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].dim() != out.dim():
        return None
    hidden: Tensor = inputs[0]
    for end in (None, -1):
        given, there = (hidden, out) if end is None else (hidden[..., :end, :], out[..., :end, :])
        if there.numel() == logits.numel() and logits.shape[-1] == out.shape[-1]:
            same = there.reshape(logits.shape).to(logits.dtype)
            if torch.equal(same, logits.detach()):
                return given
    return None


def _head_and_loss(
    dtype: torch.dtype,
    autocast: torch.dtype | None,
    head: nn.Module,
    hidden: Tensor,
    targets: Tensor,
    **options: Any,
) -> Tensor:
    logits = head.forward(hidden).to(dtype)
    with torch.autocast(hidden.device.type, autocast, enabled=autocast is not None):
        return F.cross_entropy(logits, targets, **options)


def _x(x: Tensor, targets: Tensor, **options: Any) -> None:
    """Give the inputs their names."""


class _SeesCrossEntropy(TorchFunctionMode):
    """Makes each call of `F.cross_entropy` by `call`, and leaves all else alone."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        if func is F.cross_entropy and not is_repeating():
            return self._call(args, kwargs or {})
        return func(*args, **(kwargs or {}))
