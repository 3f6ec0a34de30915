"""Tells whoever watches a model when this thread enters code of torch.compile, and when it leaves.

Dynamo guards on what lies around a compiled call: with a function mode or a global hook there it
compiles another graph, or runs parts of it eagerly, and bits change. So whoever has put something
there steps aside for that time. A function inside that `torch.compiler.disable` wraps is outside.
Leaves out what steps aside (`catcher`) and the calls that a graph makes (`compiled_taps`).
Source: torch 2.13, `_dynamo/eval_frame.py`, which sets the callback of a thread in and out.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from threading import RLock, local
from types import FrameType
from typing import Any

from torch import nn
from torch._guards import CompileContext

__all__ = [
    "NOT_A_WAY_OUT",
    "ComeBack",
    "is_in_compiled_code",
    "stepping_aside",
    "while_nothing_compiles",
]

ComeBack = Callable[[nn.Module | None], Callable[[], None]]
"""Is called on the way out of compiled code, with the module of the disabled function that leads
out, if it is one's, and returns what is called when that function has ended."""

StepAside = Callable[[], ComeBack]
"""Is called on the way into compiled code, and returns what is called on the way out."""

NOT_A_WAY_OUT = "do not trace"
"""With what the reason begins for which torch disables itself, as for a graph that it has made."""

_LOCK = RLock()
_WATCHERS: list[StepAside] = []


class _Thread(local):
    def __init__(self) -> None:
        self.is_inside = False
        self.come_back: list[ComeBack] = []
        self.crossings: list[tuple[FrameType, list[Callable[[], None]]]] = []
        """The functions of torch that have led into compiled code or out of it, innermost last,
        each with what is to be called when it has ended."""


_THREAD = _Thread()
_inside = 0
"""How many threads are in compiled code and have stepped aside for it."""


def is_in_compiled_code() -> bool:
    """Whether this thread is in compiled code, known while somebody is `stepping_aside`."""
    return _THREAD.is_inside


def while_nothing_compiles() -> AbstractContextManager[Any]:
    """Return a context in which no other thread compiles, for what a compiler would stumble over.

    Dynamo fails on a global hook that goes while it reads the hooks.
    """
    from torch._dynamo.convert_frame import compile_lock  # heavy

    return compile_lock


@contextmanager
def stepping_aside(step_aside: StepAside) -> Iterator[None]:
    """Inside, `step_aside` is called by each thread that enters compiled code.

    What that returns is called when the thread leaves it, which may be after the context has ended.
    """
    # heavy: it takes a second to import, as any optimizer does
    from torch._dynamo import eval_frame

    with _LOCK:
        if not hasattr(eval_frame._maybe_set_eval_frame, "stability_tells"):
            eval_frame._maybe_set_eval_frame = _telling(eval_frame._maybe_set_eval_frame)
        _WATCHERS.append(step_aside)
    try:
        yield
    finally:
        with _LOCK:
            _WATCHERS.remove(step_aside)
        _stop_if_nobody_asks()


def _telling(set_callback: Callable[[Any], Any]) -> Callable[[Any], Any]:
    @wraps(set_callback)
    def telling(callback: Any) -> Any:
        # torch's wrapper of the function that is called, which comes here before and after it
        wrapper = sys._getframe(1)
        crossings = _THREAD.crossings
        ended: list[Callable[[], None]] = []
        if crossings and crossings[-1][0] is wrapper:
            for end in crossings.pop()[1]:
                end()
        elif (_leaves if _THREAD.is_inside else _enters)(wrapper, callback):
            crossings.append((wrapper, ended))
        else:
            return set_callback(callback)
        # what is called here must not be compiled itself
        if not _THREAD.is_inside:
            _enter()
            return set_callback(callback)
        try:
            return set_callback(callback)
        finally:
            ended += _leave(_module_of(wrapper))

    telling.__dict__["stability_tells"] = True
    return telling


def _enters(wrapper: FrameType, callback: Any) -> bool:
    # None: it is to run as plain Python, e.g. by `torch.compiler.set_stance("force_eager")`
    return wrapper.f_code.co_name == "compile_wrapper" and callback is not None


def _leaves(wrapper: FrameType, callback: Any) -> bool:
    """Whether a function is called that a user has disabled.

    The compiler disables itself as well, for its own functions and the graphs that it has made.
    """
    if wrapper.f_code.co_name != "_fn" or CompileContext.try_get() is not None:
        return False
    function = wrapper.f_locals.get("fn")
    reason = getattr(wrapper.f_locals.get("self"), "msg", None) or ""
    module = getattr(function, "__module__", None) or ""
    is_torchs = module.startswith("torch.") and not module.startswith("torch.nn.")
    return not is_torchs and not reason.startswith(NOT_A_WAY_OUT)


def _module_of(wrapper: FrameType) -> nn.Module | None:
    """Return the module whose method a disabled function is."""
    if wrapper.f_code.co_name != "_fn":
        return None
    bound_to = getattr(wrapper.f_locals.get("fn"), "__self__", None)
    for one in (bound_to, *wrapper.f_locals.get("args", ())[:1]):
        if isinstance(one, nn.Module):
            return one
    return None


def _enter() -> None:
    global _inside
    with _LOCK:
        watchers = tuple(_WATCHERS)
        _inside += 1
    _THREAD.is_inside = True
    for step_aside in watchers:
        _THREAD.come_back.append(step_aside())


def _leave(module: nn.Module | None) -> list[Callable[[], None]]:
    global _inside
    _THREAD.is_inside = False
    # in reverse: each has found what the ones before it had left
    ends = [come_back(module) for come_back in reversed(_THREAD.come_back)]
    _THREAD.come_back.clear()
    with _LOCK:
        _inside -= 1
    _stop_if_nobody_asks()
    return ends


def _stop_if_nobody_asks() -> None:
    from torch._dynamo import eval_frame  # heavy

    with _LOCK:
        # a thread that has stepped aside still has to come back
        if not _WATCHERS and not _inside:
            present = eval_frame._maybe_set_eval_frame
            if hasattr(present, "stability_tells"):
                eval_frame._maybe_set_eval_frame = present.__wrapped__  # pyright: ignore
