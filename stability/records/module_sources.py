"""The sources of what is imported or executed, apart from what a version names already.

Modules are found where Python keeps them, and read through their loader where they lie in no file
of their own, as in a zip. A file that is executed without being kept as a module (`runpy`,
`spec_from_file_location`, `exec(compile(...))`) is seen by an audit hook, once `watch_sources` was
called. What a user's module executes as text has no file to be hashed: it is named, and its value
is `UNHASHED`. Text that an installed package makes and executes comes from its own files, which are
known. Leaves out what a module reads without executing it.
"""

import hashlib
import os
import sys
from collections.abc import Iterable, Mapping
from importlib import machinery
from pathlib import Path
from typing import Any

from stability.records.distributions import is_installed, is_known_by_version

__all__ = ["UNHASHED", "edited_modules", "own_modules", "watch_sources"]

UNHASHED = "unhashed"
"""Stands for the hash of what has no source that could be read."""

_LARGE = 2**20
"""Bytes from which a file is hashed once a process: compiled attentions have hundreds of MB."""

_WITHOUT_SOURCE = (
    machinery.BuiltinImporter,
    machinery.FrozenImporter,
    machinery.NamespaceLoader,
)
"""Loaders of modules that are Python's own, or folders."""

_COMPILER = "torch._inductor."
"""What executes the code that torch.compile writes: it follows from the model's own sources, from
torch's version and from the switches, all of which are known, and its name is another with each."""

_known: set[str] = set()
"""Names of modules that are not to be hashed: thousands, and a run asks several times."""

_large_files: dict[tuple[str, int, int], str] = {}
"""The hashes of large files, by path, size and time of the last change."""

_executed: set[tuple[str, str, str]] = set()
"""What was executed since `watch_sources`: its file, or "" for text, and who executed it, as file
and name of the module."""

_watching: list[bool] = []
"""Not empty once the hook is there, which Python never takes away again."""


def watch_sources() -> None:
    """Begin to note what is executed; forget what was noted before.

    To be called where a run begins, in its own process, before the user's modules are imported.
    """
    _executed.clear()
    if not _watching:
        _watching.append(True)
        sys.addaudithook(_note)


def _note(event: str, args: tuple[Any, ...]) -> None:
    # called for every event that Python audits, so it returns at once for nearly all
    if event != "exec":
        return
    file = args[0].co_filename
    caller = sys._getframe(1)
    name = caller.f_globals.get("__name__", "")
    _executed.add(
        ("" if file.startswith("<") else os.path.abspath(file), caller.f_code.co_filename, name)
    )


def edited_modules(recorded: Mapping[str, str], folders: Iterable[Path]) -> list[str]:
    """Return the files in `folders` of modules that were hashed, and are none of them as they were.

    `recorded` has hashes by module, as `own_modules` returns them. A module of which there is no
    file here may lie elsewhere, and is not judged.
    """
    places, edited = [*folders], []
    for name, was in recorded.items():
        path = name.replace(".", "/")
        found = [
            file
            for folder in places
            for file in (folder / f"{path}.py", folder / path / "__init__.py")
            if file.is_file()
        ]
        is_hash = len(was) == hashlib.sha256().digest_size * 2
        if is_hash and found and was not in map(_hash_file, map(str, found)):
            edited.append(found[0].name)
    return edited


def own_modules() -> dict[str, str]:
    """Return the SHA-256 of each source that was imported or executed, by the module's name.

    Left out is what `is_known_by_version`. A script that is run is called `__main__`; a file that
    is no module goes by its own name, and text by that of the module that executed it.
    """
    found: dict[str, str] = {}
    files: set[str] = set()
    for name in sys.modules.keys() - _known:
        values = getattr(sys.modules.get(name), "__dict__", {})
        sha256 = None if name.startswith(_COMPILER) else _of_module(name, values)
        if sha256 is None:
            # another script may become `__main__` in a process that was forked from this one
            _known.update({name} - {"__main__"})
            continue
        if isinstance(values.get("__file__"), str):
            files.add(os.path.abspath(values["__file__"]))
        # the script that a process of `multiprocessing` was started from has a name of its own
        found["__main__" if name == "__mp_main__" else name] = sha256
    return dict(sorted({**_of_executed(files), **found}.items()))


def _of_module(name: str, values: Any) -> str | None:
    """Return the hash of a module's source; None if it is known otherwise or has none."""
    # not getattr: a module that imports lazily would answer by importing
    file, spec = values.get("__file__"), values.get("__spec__")
    file = os.path.abspath(file) if isinstance(file, str) else ""
    if file and is_known_by_version(file):
        return None
    if file and os.path.isfile(file):
        return _hash_file(file)
    loader = getattr(spec, "loader", None)
    kind = loader if isinstance(loader, type) else type(loader)
    if loader is None or kind in _WITHOUT_SOURCE:
        return None
    # a package's own importer makes modules of what it has, as those of six and torch do
    made_by = getattr(sys.modules.get(kind.__module__), "__file__", None)
    is_of_package = kind.__module__.partition(".")[0] not in sys.stdlib_module_names
    if is_of_package and isinstance(made_by, str) and is_installed(made_by):
        return None
    content = _from_loader(loader, name, str(values.get("__file__")))
    return UNHASHED if content is None else hashlib.sha256(content).hexdigest()


def _from_loader(loader: Any, name: str, file: str) -> bytes | None:
    """Return what a loader read a module from, e.g. out of a zip; None if it does not tell."""
    try:
        return loader.get_data(file)
    except (AttributeError, OSError):
        pass  # no such method, or nothing under that name
    try:
        source = loader.get_source(name)
    except (AttributeError, ImportError):
        return None
    return source.encode() if isinstance(source, str) else None


def _of_executed(modules: set[str]) -> dict[str, str]:
    """Return the hashes of files that were executed and are no `modules`, and of text."""
    by_name: dict[str, set[str]] = {}
    for file, caller, module in list(_executed):
        if module.startswith(_COMPILER):
            continue
        if file and (file in modules or is_known_by_version(file)):
            continue
        if os.path.isfile(file):
            by_name.setdefault(os.path.basename(file), set()).add(_hash_file(file))
        elif not caller.startswith("<") and not is_installed(os.path.abspath(caller)):
            by_name[f"{module} (text that it executes)"] = {UNHASHED}
    # two files of one name count as one source
    return {name: _joined(sorted(hashes)) for name, hashes in by_name.items()}


def _joined(hashes: list[str]) -> str:
    if len(hashes) == 1:
        return hashes[0]
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def _hash_file(file: str) -> str:
    path = Path(file)
    stat = path.stat()
    if stat.st_size < _LARGE:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    key = (file, stat.st_size, stat.st_mtime_ns)
    if key not in _large_files:
        with path.open("rb") as content:
            _large_files[key] = hashlib.file_digest(content, "sha256").hexdigest()
    return _large_files[key]
