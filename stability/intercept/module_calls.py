"""Catches the calls of any modules, by globs of their names, and of functions that were wrapped.

`shadow(modules={"*.mlp": ..., "*.rotary": ...})` looks at these in the training's own call, and
hands each to a `ModuleProbe`. Nothing is put on the model: hooks are torch's global ones, there
while a step is looked at. Leaves out the comparison (`probe.module_probe`) and losses
(`loss_calls`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial, wraps
from threading import local
from typing import Any

import torch
from torch import Tensor, nn

from stability.intercept.catcher import Catcher, transform_around
from stability.intercept.eager import check_eager
from stability.intercept.global_hooks import put_global_hooks
from stability.intercept.layer_names import is_parallel_wrapper, layer_names
from stability.probe.captured_call import version_of
from stability.probe.isolation import host_random_state
from stability.probe.module_call import (
    ModuleCall,
    autocast_now,
    forward_of,
    named_tensors,
    replica_of,
)
from stability.probe.module_candidates import ModuleCandidate
from stability.probe.module_probe import ModuleProbe
from stability.records.metric_names import without_batch

__all__ = ["FUNCTIONS", "Entered", "ModuleCalls", "module_call"]

FUNCTIONS: set[str] = set()
"""The names under which functions have been wrapped."""

Noted = Callable[[str, bool], bool]
"""Is told of each call of a layer and whether it trains; says whether it is one to look at."""

_RANDOM = (
    "not looked at: it draws random numbers, e.g. for dropout, and a candidate would draw others"
)
_SHARDED = (
    "not looked at: fully_shard gathers its weights around each call; name the modules inside of "
    "it, e.g. *.mlp where it shards the blocks"
)
_IN_PLACE = "not looked at: it writes into its inputs"


@dataclass(frozen=True, slots=True)
class Entered:
    """What has to be known of a call before it is made, so that it can be repeated."""

    layer: str
    module: nn.Module | None
    """A replica with buffers as they are now."""
    versions: tuple[tuple[Tensor, int], ...]
    random_state: tuple[Any, ...]
    autocast: torch.dtype | None

    @classmethod
    def of(cls, layer: str, module: nn.Module | None, args: Any) -> "Entered":
        """Note what is to be known of a call with these arguments."""
        found = named_tensors(args, "x")[0].values()
        replica = None
        if module is not None:
            # parameters by reference: nothing may change them before the update
            replica = replica_of(module, lambda x: x, lambda x: x.detach().clone())
        versions = tuple((x, version_of(x)) for x in found)
        return cls(layer, replica, versions, _random_state(), autocast_now(found))

    def objection(self) -> str:
        """Say why the call, now over, cannot be repeated; "" if it can."""
        if self.random_state != _random_state():
            return _RANDOM
        if self.module is not None and _is_sharded(self.module):
            return _SHARDED
        return _IN_PLACE if any(version_of(x) != before for x, before in self.versions) else ""


def _is_sharded(module: nn.Module) -> bool:
    kinds = (kind for one in module.modules() for kind in type(one).__mro__)
    return any(kind.__name__ == "FSDPModule" for kind in kinds)


def _random_state() -> tuple[Any, ...]:
    states = [torch.get_rng_state()]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    of_python, (kind, words, *rest) = host_random_state()
    return of_python, kind, words.tobytes(), *rest, torch.cat(states).numpy().tobytes()


class _Thread(local):
    def __init__(self) -> None:
        self.entered: list[tuple[nn.Module, Entered | None]] = []
        """The calls of modules that run, innermost last; None where one is not looked at."""


class ModuleCalls:
    """Hands calls of the modules and functions that `candidates`, by glob, match to `probe`."""

    def __init__(
        self,
        model: nn.Module,
        candidates: Mapping[str, ModuleCandidate],
        probe: ModuleProbe,
        noted: Noted,
    ) -> None:
        self.called: set[str] = set()
        """The layers whose calls were met so far."""
        self._model = model
        self._candidates = candidates
        self._probe = probe
        self._noted = noted
        self._catcher: Catcher | None = None
        self._thread = _Thread()

    @contextmanager
    def catching(self) -> Iterator[None]:
        """Inside, calls are looked at."""
        catcher = self._catcher = Catcher(self._model, None)
        put = partial(put_global_hooks, self._before, self._after, with_kwargs=True)
        catcher.everywhere.append(put)
        catcher.checks.append(check_eager)
        _OPEN.append(self)
        try:
            with catcher.watching():
                yield
        finally:
            _OPEN.remove(self)

    @property
    def may_catch(self) -> bool:
        """Whether a call that this thread makes now is one of the model's."""
        return self._catcher is not None and self._catcher.may_catch

    def not_called(self) -> list[str]:
        """Return the modules that match a glob and can run, and did not by now."""
        return [
            name
            for module, name in layer_names(self._model).items()
            if self._candidate_of(name)
            and type(module).forward is not nn.Module.forward
            and not isinstance(module, nn.ModuleList | nn.ModuleDict)
            and name not in {layer.partition("#")[0] for layer in self.called}
        ]

    def numbered(self, layer: str) -> str:
        """Return `layer` with the number of this call behind it, if it is another of one pass."""
        return layer if self._catcher is None else self._catcher.numbered(layer)

    def enter(self, layer: str, module: nn.Module | None, args: Any) -> Entered | None:
        """Note a call that is to be made; None if it is not to be captured."""
        self.called.add(layer)
        trains = torch.is_grad_enabled() and self._model.training
        named = self._probe.name_if_due(layer) if self._noted(layer, trains) else ""
        unsupported = transform_around()
        if named and unsupported:
            self._probe.find(named, f"not looked at: {unsupported}")
            return None
        return Entered.of(named, module, args) if named else None

    def leave(
        self,
        entered: Entered,
        candidate: ModuleCandidate,
        own: Callable[..., Any],
        named_by: Callable[..., Any],
        given: tuple[tuple[Any, ...], Mapping[str, Any]],
        result: Any,
    ) -> None:
        """Capture a call that was made, by what it was given and what came out."""
        objection = entered.objection()
        out, others = named_tensors(result, "out")
        for other in others:
            self._probe.find(entered.layer, f"{other}, is not compared: it is no tensor")
        if objection or not out:
            self._probe.find(entered.layer, objection or "not looked at: it returns no tensor")
            return
        call = ModuleCall.of(
            *(entered.layer, entered.module, own, *given, out),
            named_by=named_by,
            autocast=entered.autocast,
        )
        self._probe.capture(call, candidate, out)

    def find(self, layer: str, text: str) -> None:
        """Add a finding."""
        self._probe.find(layer, text)

    def call_function(
        self, name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Call a wrapped function, and capture the call if it is looked at."""
        assert self._catcher is not None
        layer = self._catcher.numbered(f"{self._catcher.running_layer()}.{name}")
        candidate = self._candidate_of(layer)
        entered = candidate and self.enter(layer, None, (args, kwargs))
        result = function(*args, **kwargs)
        if entered and candidate:
            self.leave(entered, candidate, function, function, (args, kwargs), result)
        return result

    def _candidate_of(self, layer: str) -> ModuleCandidate | None:
        """Return the candidate of the first glob that matches."""
        name = layer.partition("#")[0]
        found = (one for glob, one in self._candidates.items() if fnmatchcase(name, glob))
        return next(found, None)

    def _before(self, module: nn.Module, args: Any) -> None:
        catcher = self._catcher
        if catcher is None or torch.compiler.is_dynamo_compiling() or not catcher.knows(module):
            return
        if is_parallel_wrapper(module):
            return  # its forward synchronises ranks, and what it wraps has the same name
        if catcher.may_catch and self._candidate_of(catcher.names[module]):
            entered = self.enter(catcher.next_layer(module), module, args)
            self._thread.entered.append((module, entered))

    def _after(self, module: nn.Module, args: Any, *kwargs_and_out: Any) -> None:
        running = self._thread.entered
        if not any(one is module for one, _ in running):
            return
        # those inside it that an error has ended are over as well
        while running[-1][0] is not module:
            running.pop()
        _, entered = running.pop()
        candidate = entered and self._candidate_of(without_batch(entered.layer))
        if entered is None or candidate is None or len(kwargs_and_out) < 2:
            return
        kwargs, result = kwargs_and_out
        assert entered.module is not None
        self.leave(entered, candidate, forward_of, entered.module.forward, (args, kwargs), result)


_OPEN: list[ModuleCalls] = []
"""All that look at calls now, of any model."""


def module_call(function: Callable[..., Any], name: str = "") -> Callable[..., Any]:
    """Return `function` as one that `shadow(modules=...)` sees; also a decorator.

    It is looked at where a model calls it, under the path of the module that does, a dot, and
    `name`, by default its own: `modules={"*.apply_rotary_pos_emb": "mypkg:my_rotary"}`. Arguments
    and results may hold tensors in tuples, lists and mappings.
    """
    known = name or getattr(function, "__name__", type(function).__name__)
    FUNCTIONS.add(known)

    @wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # first: a graph is to be what it is without this
        if not torch.compiler.is_dynamo_compiling():
            for calls in reversed(tuple(_OPEN)):
                if calls.may_catch:
                    return calls.call_function(known, function, args, kwargs)
        return function(*args, **kwargs)

    return watched
