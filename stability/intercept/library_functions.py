"""Catches the attention of libraries: flash-attn's functions, flex_attention, Transformer Engine.

A function is held by whoever imported it by name, so it is replaced wherever a module of the
process holds it, or a class or an attribute of the watched model, also compiled; a class has its
forward replaced. Everywhere at once, for as long as a session is open: the one in its place calls
it as it is unless somebody watches the model that runs. What is imported later is found at the next
forward pass that is looked at. Leaves out what the arguments mean (`flash_attn_calls` and its
like), what is done with a call (`probe`), and functions that are held elsewhere, as in a closure:
`coverage` says what was not seen.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import update_wrapper
from inspect import signature
from threading import RLock
from types import FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stability.intercept.catcher import Catcher, newest_catcher
from stability.intercept.flash_attn_cache_calls import read_with_cache
from stability.intercept.flash_attn_calls import FLASH_ATTN
from stability.intercept.flex_calls import read_flex
from stability.intercept.library_call import Reader
from stability.intercept.transformer_engine_calls import read_transformer_engine
from stability.probe.autocast import autocast_dtype
from stability.probe.captured_call import AttentionCall, is_repeating

__all__ = ["catch_late_imports", "watching_library_functions"]

_FLASH_ATTN: dict[str, Reader] = {**FLASH_ATTN, "flash_attn_with_kvcache": read_with_cache}
_LIBRARIES: dict[str, dict[str, Reader]] = {
    "flash_attn": _FLASH_ATTN,
    "flash_attn_interface": _FLASH_ATTN,
    "torch.nn.attention.flex_attention": {"flex_attention": read_flex},
    "transformer_engine": {"DotProductAttention.forward": read_transformer_engine},
}
"""What is watched of which library, and how its calls are read."""
_WATCHED = frozenset(name for readers in _LIBRARIES.values() for name in readers)

_CLASSES = {"transformer_engine.pytorch": "DotProductAttention"}
"""The modules whose classes are watched, so that every instance is, whenever it was made."""


@contextmanager
def watching_library_functions(model: nn.Module) -> Iterator[None]:
    """Inside, calls of the libraries' functions that are imported by now are seen."""
    watch = _Watch(model)
    with _LOCK:
        watch.look()
        _OPEN.append(watch)
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.remove(watch)
            watch.restore()


@contextmanager
def catch_late_imports(catcher: Catcher) -> Iterator[None]:
    """Inside, what was imported since is found when a forward pass begins."""
    catcher.checks.append(_look_again)
    yield


class _Watch:
    """What one session has put in the place of the libraries' functions."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._imported: frozenset[str] = frozenset()
        """The libraries that were imported when it looked."""
        self._originals: dict[int, tuple[Any, Any]] = {}
        """Each function that was put somewhere, by its id, with the one that stood there."""

    def look(self) -> None:
        """Replace the functions of the libraries that were imported since it looked last."""
        imported = frozenset(name for name in _LIBRARIES if name in sys.modules)
        if imported == self._imported:
            return
        self._imported = imported
        places = list(_places(self._model, _reader_of))
        put = {id(place.value): _watched(place.value) for place in places}
        for place in places:
            ours = put[id(place.value)]
            self._originals[id(ours)] = ours, place.value
            place.put(ours)

    def restore(self) -> None:
        """Put the libraries' own back."""
        # also what was imported meanwhile, which got the ones that stood there
        for place in _places(self._model, lambda function: id(function) in self._originals):
            place.put(self._originals[id(place.value)][1])


_LOCK = RLock()
_OPEN: list[_Watch] = []


def _look_again(_: nn.Module) -> None:
    with _LOCK:
        for watch in _OPEN:
            watch.look()


def _watched(function: Any) -> Any:
    """Return what stands where a library's function stood."""
    if not getattr(function, "_torchdynamo_disable", False):
        return _WatchedFunction(function)
    # a compiler is to leave the same function alone, and the call is caught inside of that
    return torch.compiler.disable(
        _WatchedFunction(function._torchdynamo_orig_callable),
        recursive=getattr(function, "_torchdynamo_disable_recursive", True),
        reason=getattr(function, "_torchdynamo_disable_msg", None),
    )


class _Place(NamedTuple):
    """A name that holds a function."""

    owner: Any
    name: str
    value: Any
    is_static: bool

    def put(self, value: Any) -> None:
        setattr(self.owner, self.name, staticmethod(value) if self.is_static else value)


def _places(model: nn.Module, is_one: Callable[[Any], Any]) -> Iterator[_Place]:
    """Give the places of the process that hold a function of which `is_one` is true."""
    if not any(library in sys.modules for library in _LIBRARIES):
        return
    owners: list[Any] = [m for m in tuple(sys.modules.values()) if isinstance(m, ModuleType)]
    for module in model.modules():
        owners += [module, *type(module).__mro__]
    for name, kind in _CLASSES.items():
        owners += [*getattr(getattr(sys.modules.get(name), kind, None), "__mro__", ())]
    for owner in dict.fromkeys(owners):
        held = getattr(owner, "__dict__", {})
        # values first: a process holds some hundred thousand, and each session looks twice
        if not any(map(is_one, _functions(tuple(held.values())))):
            continue
        for name, value in tuple(held.items()):
            for function in filter(is_one, _functions((value,))):
                yield _Place(owner, name, function, type(value) is staticmethod)


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    """Give the functions among `values`, told by type alone: a proxy that is asked may warn."""
    for value in values:
        function = value.__func__ if type(value) is staticmethod else value
        kind = type(function)
        if kind is FunctionType or kind is _WatchedFunction:
            yield function


def _reader_of(function: Any) -> Reader | None:
    """Return how the calls of a function are read, None if it is none of the libraries'."""
    plain = getattr(function, "_torchdynamo_orig_callable", function)
    if isinstance(plain, FunctionType) and plain.__qualname__ in _WATCHED:
        for library, readers in _LIBRARIES.items():
            if f"{plain.__module__}.".startswith(f"{library}."):
                return readers.get(plain.__qualname__)
    return None


class _WatchedFunction:
    """Stands where a library's function stood."""

    __wrapped__: Callable[..., Any]

    def __init__(self, function: Callable[..., Any]) -> None:
        update_wrapper(self, function)
        reader = _reader_of(function)
        assert reader is not None
        self._reader = reader
        plain = getattr(function, "_torchdynamo_orig_callable", function)
        self._signature = signature(plain)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """Be bound as the function would be, where a class holds it."""
        return self if instance is None else MethodType(self, instance)

    def __reduce__(self) -> Any:
        """Copy and pickle as the function itself."""
        return self.__wrapped__.__reduce_ex__(4)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the function itself, as `__reduce__`."""
        return self.__wrapped__

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        # first: a graph is to be what it is without this, and guards on what it has asked for
        catcher = None if torch.compiler.is_dynamo_compiling() else newest_catcher()
        if catcher is None:
            return self.__wrapped__(*args, **kwargs)
        given = self._signature.bind(*args, **kwargs)
        given.apply_defaults()
        # by this object: an outer catch is still to see the call
        read = self._reader(self, given)
        made: list[tuple[Any, Tensor]] = []
        has_graph = torch.is_grad_enabled()

        def primary(
            q: Tensor, k: Tensor, v: Tensor, **trained: Tensor
        ) -> tuple[Tensor, Tensor | None]:
            returned = read.call(q, k, v, **trained)
            out = read.out_as_ours(returned)
            if torch.is_grad_enabled() == has_graph and not is_repeating():
                made.append((returned, out))
            return out, read.lse_of(returned)

        module = given.arguments.get("self")
        known = isinstance(module, nn.Module) and catcher.knows(module)
        q, k, v = read.qkv
        call = AttentionCall(
            layer=catcher.next_layer(module if known else None),
            q=q,
            k=k,
            v=v,
            mask=read.mask,
            valid=read.valid,
            dtype=None if read.unsupported else autocast_dtype(q, k, v),
            unsupported=read.unsupported,
            trained=read.trained,
            hides=read.hides,
        )
        out = catcher.hand_over(call, primary)
        # one made on the side, or without its gradients, is not what the model gets
        own = next((returned for returned, its_out in made if its_out is out), None)
        made.clear()  # the primary lives as long as the graph, which is not to live by it
        if own is None and read.asks_more:
            raise ValueError(
                f"shadow: {call.layer} must ask for its out alone where another attention takes "
                f"the place of its own, got {read.asks_more}"
            )
        return read.with_out(own, out)
