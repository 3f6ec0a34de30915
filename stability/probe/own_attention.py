"""A user's own attention: found by an entry point or as module:function, and called as it allows.

It is a function of (q, k, v, *, causal, scale=None) and may take more of `MaskArguments` by name;
it is given those that the call really has, and a call with one that it does not take is refused, so
that nothing is ever left out in silence. Leaves out checking what it returns (`comparison`).
"""

import hashlib
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from torch import Tensor

from attention_kernels import MaskArguments
from stability.config.convert import nearest
from stability.config.plugins import ATTENTIONS, plugins

__all__ = ["OwnAttention", "find_own", "is_own", "loaded"]


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnAttention:
    """A function to be called like `flash_attention`, and where it comes from."""

    name: str
    function: Callable[..., Tensor]
    description: dict[str, Any]


def is_own(name: str) -> bool:
    """Say whether `name` is an entry point or reads as module:function; imports nothing."""
    module, colon, function = name.partition(":")
    readable = all(part.isidentifier() for part in (*module.split("."), function))
    return name in plugins(ATTENTIONS) or bool(colon and readable)


def find_own(name: str) -> OwnAttention:
    """Import what `name` stands for; ValueError if that fails or it is no attention."""
    entry = plugins(ATTENTIONS).get(name)
    where = entry.value if entry else name
    module_name, _, attribute = where.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(
            f"find_own: attention must be MODULE:FUNCTION of a module that imports, got {where!r}; "
            f"{error}"
        ) from error
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"find_own: attention must be a function that {module_name} has, got {attribute!r}; "
            f"nearest: {nearest(attribute, [key for key in dir(module) if key[0] != '_'])}"
        )
    return loaded(name, function)


def loaded(name: str, function: Callable[..., Any]) -> OwnAttention:
    """Return `function` as an attention called `name`.

    Its description has the module and the SHA-256 of its file, so that two runs with different
    sources are told apart. ValueError if it can't be called as (q, k, v, causal=, scale=).
    """
    takes = _takes(name, function)
    source = inspect.getsourcefile(inspect.unwrap(function)) if inspect.isroutine(function) else ""
    digest = hashlib.sha256(Path(source).read_bytes()).hexdigest() if source else ""
    return OwnAttention(
        name=name,
        function=partial(_call, function, name, takes),
        description={
            "implementation": name,
            "engine": getattr(function, "__module__", ""),
            "source": digest,
        },
    )


def _takes(name: str, function: Callable[..., Any]) -> frozenset[str]:
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin does not tell
        return frozenset(("causal", "scale"))
    try:
        signature.bind(None, None, None, causal=True, scale=1.0)
    except TypeError as error:
        raise ValueError(
            f"find_own: attention must be a function of (q, k, v, *, causal, scale), got {name!r} "
            f"of {signature}; {error}"
        ) from error
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if inspect.Parameter.VAR_KEYWORD in kinds:
        return frozenset(MaskArguments.__annotations__)
    return frozenset(signature.parameters)


def _call(
    function: Callable[..., Tensor],
    name: str,
    takes: frozenset[str],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **mask: Unpack[MaskArguments],
) -> Tensor:
    asked = {key: value for key, value in mask.items() if _says_something(key, value)}
    refused = [key for key in asked if key not in takes]
    if refused:
        raise ValueError(
            f"{name}: the mask must be one that it takes, got {refused[0]}; "
            f"it takes {', '.join(sorted(takes & set(MaskArguments.__annotations__)))}"
        )
    return function(q, k, v, **{"causal": False, **asked})


def _says_something(key: str, value: Any) -> bool:
    if value is None or (isinstance(value, tuple) and value == (None, None)):
        return False
    return key == "scale" or isinstance(value, Tensor) or bool(value)
