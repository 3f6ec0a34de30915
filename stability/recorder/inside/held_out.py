"""Calls the user's own held-out loss, `module:function`, with the model that trains.

It is called at the steps whose state is kept, in evaluation mode, without gradients, not compiled,
and outside of the script's autocast. Modes, random generators and switches are put back; a function
that moves a weight is refused. Leaves out what the script evaluates by itself (`evaluations`).
"""

from __future__ import annotations

import importlib
import os
import random
import sys
from contextlib import contextmanager
from typing import Any, Callable, Iterator, List, Tuple

import torch
from torch import Tensor, nn

from .names import unwrapped, version_of

__all__ = ["HeldOutLoss", "evaluating"]


class HeldOutLoss:
    """A function of the user's that returns the held-out loss of a model, and its name."""

    def __init__(self, name: str, function: "Callable[[nn.Module], Any] | None" = None) -> None:
        self._name, self._function = name, function

    def of(self, model: nn.Module) -> float:
        """Return the loss of what `model` wraps; ValueError if that is not one number."""
        if self._function is None:
            self._function = _imported(self._name)
        inner = unwrapped(model)
        tensors = [*inner.parameters(), *inner.buffers()]
        before = list(map(version_of, tensors))
        eager: Any = torch.compiler.disable
        with evaluating(inner):
            try:
                loss = eager(self._function)(inner)
            except Exception as error:  # a user's function may raise anything
                said = f"{type(error).__name__}: {error}".replace("\n", " ")
                raise ValueError(
                    f"held_out: {self._name} must return the mean loss of the model that it is "
                    f"given, raised {said}"
                ) from error
        _reshard(inner)
        if list(map(version_of, tensors)) != before:
            raise ValueError(f"held_out: {self._name} must change no weight or buffer of the model")
        return self._number(loss)

    def _number(self, loss: Any) -> float:
        try:
            if isinstance(loss, bool):
                raise TypeError
            return float(loss)
        except (TypeError, ValueError, RuntimeError):
            kind = type(loss).__name__
            shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else ""
            raise ValueError(
                f"held_out: {self._name} must return one number, the mean loss, got {kind}{shape}"
            ) from None


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Compute in evaluation mode and without gradients; then all is as it was."""
    were_training = [module for module in model.modules() if module.training]
    generators = _generators()
    has_cache = torch.is_autocast_cache_enabled()
    # a cast that is made without gradients must not be found by the pass that trains
    torch.set_autocast_cache_enabled(False)
    kinds = {x.device.type for x in model.parameters()} | {"cpu"}
    off = [torch.autocast(kind, enabled=False) for kind in sorted(kinds & {"cpu", "cuda"})]
    for each in off:
        each.__enter__()
    try:
        with torch.no_grad():
            model.eval()
            yield
    finally:
        for each in reversed(off):
            each.__exit__(None, None, None)
        torch.set_autocast_cache_enabled(has_cache)
        for module in were_training:
            # not .train(), which would also set the modules below
            module.training = True
        for restore, state in generators:
            restore(state)


def _reshard(model: nn.Module) -> None:
    """Free the whole weights that FSDP has gathered: the next update would leave them as old."""
    for module in model.modules():
        reshard = getattr(type(module), "reshard", None)
        if reshard is not None and hasattr(type(module), "unshard"):
            reshard(module)


def _generators() -> List[Tuple[Callable[[Any], Any], Any]]:
    """Return what puts each random generator back, and its state now."""
    found: List[Tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (torch.set_rng_state, torch.get_rng_state()),
    ]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append((torch.cuda.set_rng_state_all, torch.cuda.get_rng_state_all()))
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        found.append((numpy.random.set_state, numpy.random.get_state()))
    return found


def _imported(name: str) -> Callable[[nn.Module], Any]:
    """Return the function `module:function`, of the script, beside it, or below where it runs."""
    place, _, attribute = name.partition(":")
    main = sys.modules.get("__main__")
    file = os.path.splitext(os.path.basename(str(getattr(main, "__file__", ""))))[0]
    here = os.getcwd()
    try:
        if place == file and place not in sys.modules:
            place = "__main__"  # imported anew, the script would train a second time
        if here not in sys.path:
            sys.path.append(here)  # as the last: it hides nothing of the script's
        found = getattr(importlib.import_module(place), attribute)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        said = (
            "" if isinstance(error, (ImportError, AttributeError)) else f"{type(error).__name__}: "
        )
        raise ValueError(
            f"held_out: {name} must be a function that the script's process can import: "
            f"{said}{error}"
        ) from error
    if not callable(found):
        raise ValueError(f"held_out: {name} must be a function, got {type(found).__name__}")
    return found
