"""Finds modules of which Python ran other code than their source says.

Python takes a module's .pyc where the source has the size and the time of change that it was
compiled at. An edit that keeps both (a file restored with its times, two edits within a second on
some disks) leaves the old code running, while a hash of the source names the new one. A .pyc that
is never checked against its source is found as well.
"""

import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

__all__ = ["refuse_stale_bytecode"]


def refuse_stale_bytecode(names: Iterable[str]) -> None:
    """ValueError, naming the file, if an imported module's .pyc is not that of its source."""
    for name in names:
        spec = getattr(sys.modules.get(name), "__spec__", None)
        # a script that is run has none, and other loaders keep no .pyc of their own
        if spec is None or type(spec.loader) is not SourceFileLoader or not spec.cached:
            continue
        path = Path(spec.loader.path)
        if not path.is_file() or not Path(spec.cached).is_file():
            continue
        ran = spec.loader.get_code(spec.name)
        written = spec.loader.source_to_code(path.read_bytes(), str(path))
        if ran is not None and not _are_same(ran, written):
            raise ValueError(
                f"{path}: its .pyc is not that of its source, so that other code ran than would "
                f"be on record: delete {Path(spec.cached).parent}"
            )


def _are_same(first: CodeType, second: CodeType) -> bool:
    # a constant that is no number is unequal to itself, but has one spelling
    return first == second or _spelled(first) == _spelled(second)


def _spelled(code: CodeType) -> tuple[object, ...]:
    """Return what decides what a code does, with its constants as text."""
    constants = [
        _spelled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts
    ]
    names = code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars
    return code.co_code, code.co_flags, code.co_exceptiontable, names, constants
