"""Functions that a user names as `module:function`: imported, and told apart by their source.

Leaves out what such a function is called with (`attention_registry`, `module_candidates`).
"""

import difflib
import hashlib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

__all__ = ["did_you_mean", "import_function", "source_hash"]

_MOST_NAMED = 5
"""Of a module's functions that are listed where none is like the one that was asked for."""


def import_function(where: str, what: str) -> Callable[..., Any]:
    """Import the function that `where`, `module:function`, names.

    ValueError, which opens with `what` it is to be, if that fails or it can't be called.
    """
    module_name, _, attribute = where.partition(":")
    here = Path.cwd()
    try:
        module = _import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        said = f"{type(error).__name__}: {error}".removesuffix(": ")
        raise ValueError(
            f"{what} must be MODULE:FUNCTION of a module that imports, got {where!r}; {said}"
            f"{did_you_mean(where) or _nearest_here(module_name, error)}"
        ) from error
    finally:
        if Path.cwd() != here:  # a study's own paths begin there
            os.chdir(here)
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(
            f"{what} must be a function that {module_name} has, got {attribute!r}; "
            f"{_nearest_function(attribute, module)}"
        )
    return function


def _nearest_function(name: str, module: ModuleType) -> str:
    """Return "nearest: attend", of the functions that the module defines, or else that it imports.

    Where none is alike, some that it defines are named.
    """
    known = {key: value for key, value in vars(module).items() if callable(value) and key[0] != "_"}
    own = [
        key for key, value in known.items() if getattr(value, "__module__", "") == module.__name__
    ]
    for names in (own, known):
        if alike := difflib.get_close_matches(name, names, n=3, cutoff=0.6):
            return f"nearest: {', '.join(alike)}"
    some = sorted(own or known)
    more = f" and {len(some) - _MOST_NAMED} more" if len(some) > _MOST_NAMED else ""
    return f"it has {', '.join(some[:_MOST_NAMED])}{more}" if some else "it has none"


def did_you_mean(where: str) -> str:
    """Return "; did you mean attn:f" for "attn.py:f" or "attn.f"; "" where there is no such module.

    Nothing is imported for it.
    """
    module_name, colon, attribute = where.partition(":")
    parts = PurePath(module_name.removesuffix(".py")).parts
    is_module = bool(parts) and all(part.isidentifier() for part in parts)
    if module_name.endswith(".py") and is_module and Path(module_name).is_file():
        return f"; did you mean {'.'.join(parts)}:{attribute or 'FUNCTION'}"
    if colon or not all(part.isidentifier() for part in where.split(".")):
        return ""
    if _is_module(where):
        return f"; did you mean {where}:FUNCTION"
    module_name, _, attribute = where.rpartition(".")
    return f"; did you mean {module_name}:{attribute}" if _is_module(module_name) else ""


def _is_module(name: str) -> bool:
    """Whether a module of this name lies in this folder or where modules are looked for."""
    *folders, last = name.split(".")
    places = [Path(place, *folders) for place in (".", *sys.path)]
    found = (place / file for place in places for file in (f"{last}.py", f"{last}/__init__.py"))
    return bool(last) and any(file.is_file() for file in found)


def _nearest_here(name: str, error: BaseException) -> str:
    """Return "; in this folder: attn", the names alike, where it is `name` itself that is nowhere.

    Not where a module that it imports is missing, or raises.
    """
    top = name.partition(".")[0]
    if not isinstance(error, ModuleNotFoundError) or error.name != top:
        return ""
    here = [path.stem for path in sorted(Path.cwd().glob("*.py"))]
    here += [path.parent.name for path in sorted(Path.cwd().glob("*/__init__.py"))]
    alike = difflib.get_close_matches(top, here, n=3)
    return f"; in this folder: {', '.join(alike)}" if alike else ""


def _import_module(name: str) -> ModuleType:
    """Import a module; one that is nowhere else may lie in the current folder.

    As with `python -m`; but the folder goes last, so that no file in it hides a library's module.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        here = str(Path.cwd())
        if error.name != name.partition(".")[0] or here in sys.path:
            raise
        sys.path.append(here)
        return importlib.import_module(name)


def source_hash(function: Callable[..., Any]) -> str:
    """Return the SHA-256 of the function's file; of its own lines where a notebook's cell has it.

    Empty where there is no source: a builtin, or what was typed at a prompt.
    """
    if not inspect.isroutine(function):
        return ""
    plain = inspect.unwrap(function)
    try:
        file = Path(inspect.getsourcefile(plain) or "")
        source = file.read_bytes() if file.is_file() else inspect.getsource(plain).encode()
    except (OSError, TypeError):
        return ""
    return hashlib.sha256(source).hexdigest()
