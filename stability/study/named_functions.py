"""Whether the functions that a study of commands names can be there, before its first run.

`held_out`, `attention` and a probe's candidate are MODULE:FUNCTION of the script's own environment.
The script's interpreter is asked where it would find the module, and the module's source is read:
none of the user's code is executed, and the answer takes a fraction of a second. Refused is only
what can't be: where a script sets its own path, a program starts it that is not known, or a module
makes its names as it is imported, the first run tells. Leaves out whether a function does what it
has to (`recorder.inside`).
"""

import ast
import difflib
import json
import os
import re
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from shutil import which
from typing import Any

from stability.config.attentions import IMPLEMENTATIONS
from stability.config.commands import end_of_program
from stability.config.convert import nearest
from stability.config.schema import BASELINE
from stability.study.foreign import variables_of
from stability.study.foreign_plan import ForeignRun

__all__ = ["check_named_functions"]

_LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
"""Programs that start a script by the interpreter beside them."""
_FIND = """
import importlib.machinery, importlib.util, json, os, sys
first, (top, *below) = sys.argv[1], sys.argv[2].split(".")
sys.path[:1] = [first] if sys.path[0] == "" else sys.path[:1]
sys.path.append(os.getcwd())
spec, name = importlib.util.find_spec(top), top
for part in below:
    places, name = spec.submodule_search_locations if spec else None, name + "." + part
    spec = importlib.machinery.PathFinder.find_spec(name, places) if places else None
has_top = importlib.util.find_spec(top) is not None
print(json.dumps({"is_found": bool(spec), "has_top": has_top, "file": getattr(spec, "origin", "")}))
"""
"""What the script's interpreter is asked, in its environment; a package is not imported for it."""
_SETS_PATH = re.compile(
    r"\b(?:sys\.path|sys\.modules|meta_path|addsitedir|chdir|__path__|rootutils|pyrootutils)\b"
)
_MAKES_NAMES = re.compile(
    r"\b(?:globals|exec|setattr|__getattr__|sys\.modules)\b|\b(?:vars\(\)|locals\(\)|__dict__)\["
)
_LONGEST_S = 30


@dataclass(frozen=True, kw_only=True, slots=True)
class _Python:
    """How a script is started, as far as it decides what an import finds."""

    interpreter: str
    folder: Path
    """Where the command runs."""
    script: Path | None
    """The file that is started; None for a module that was not found in `folder`."""
    main: str
    """The name under which the script itself is known."""
    first: Path
    """What comes first on the path of imports."""


def check_named_functions(runs: Sequence[ForeignRun], folders: Mapping[str, Path | None]) -> None:
    """ValueError if a function that an arm of `runs` names can't be there; executes nothing of it.

    The error names the key, the value and the nearest name. `folders` are the checkouts that the
    arms run in, None for the current folder.
    """
    base = dict(_named(runs[0])) if runs[0].arm == BASELINE else {}
    tried: set[tuple[Any, ...]] = set()
    for run in (run for run in runs if run.seed == runs[0].seed):
        variables = {**os.environ, **variables_of(run)}
        python = _python_of(run, folders[run.arm] or Path.cwd(), variables.get("PATH"))
        if python is None:
            continue
        for key, name in _named(run):
            asked = (name, python, tuple(sorted(run.env.items())))
            if asked in tried:
                continue
            tried.add(asked)
            if problem := _problem(name, python, variables):
                where = "base" if base.get(key) == name else f"arms.{run.arm}"
                raise ValueError(
                    f"{where}.{key}: must be MODULE:FUNCTION, a function that the script can "
                    f"import, got {name!r}; {problem}"
                )


def _named(run: ForeignRun) -> Iterator[tuple[str, str]]:
    """Yield the key and the name of each function of the user's that a run calls."""
    asked = run.asked
    given = {
        "held_out": asked.held_out,
        "attention": asked.attention.partition("+")[0],
        "probe.candidate": asked.probe.get("candidate", "").partition("+")[0],
    }
    for key, name in given.items():
        is_ours = key != "held_out" and name.partition(":")[0] in IMPLEMENTATIONS
        if ":" in name and not is_ours:
            yield key, name


def _python_of(run: ForeignRun, folder: Path, path: str | None) -> _Python | None:
    """Return how the script of a run is started; None where that is not known."""
    program = list(run.words[: end_of_program(run.words)])
    starter, name = which(program[0], path=path), PurePath(program[0]).name
    is_python = name.startswith("python")
    if starter is None or len(program) == 1 or not (is_python or name in _LAUNCHERS):
        return None
    interpreter = Path(starter) if is_python else Path(starter).with_name("python")
    if not interpreter.is_file():
        return None
    if program[-1].endswith(".py"):
        script = folder / program[-1]
        first = script.resolve().parent  # as Python has it, also of a link
    else:
        script, first = folder / f"{program[-1].replace('.', '/')}.py", folder
    return _Python(
        interpreter=str(interpreter),
        folder=folder,
        script=script if script.is_file() else None,
        main=script.stem,
        first=first,
    )


def _problem(name: str, python: _Python, variables: Mapping[str, str]) -> str:
    """Return why the function `name` can't be there, in the words of an error; empty if it may."""
    module, _, function = name.partition(":")
    file = python.script
    if module != python.main:
        found = _found(module, python, variables)
        if found is None:
            return ""
        if not found["is_found"]:
            return _problem_of_module(module, python, has_top=found["has_top"])
        file = Path(found["file"] or "")
    names = _names_in(file) if file is not None and file.suffix == ".py" else None
    if file is None or names is None or function in names:
        return ""
    public = [each for each in sorted(names) if not each.startswith("_")]
    near = f"; nearest: {nearest(function, public)}" if public else ""
    return f"{file.name} has no {function}{near}"


def _found(module: str, python: _Python, variables: Mapping[str, str]) -> dict[str, Any] | None:
    """Return what the script's interpreter finds under a module's name; None if it can't say."""
    words = [python.interpreter, "-c", _FIND, str(python.first.resolve()), module]
    try:
        said = subprocess.run(
            words,
            cwd=python.folder,
            env=variables,
            capture_output=True,
            text=True,
            timeout=_LONGEST_S,
            check=True,
        )
        return json.loads(said.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None


def _problem_of_module(module: str, python: _Python, *, has_top: bool) -> str:
    """Return that there is no such module where the script looks; empty where it may look on.

    `has_top` says whether there is what its name begins with, as `pkg` of `pkg.losses`.
    """
    top, places = module.partition(".")[0], _places(python)
    is_own = any((x / top).is_dir() or (x / f"{top}.py").is_file() for x in places)
    if python.script is None or (has_top and not is_own):
        return ""
    # what sets the path, or what a script imports for that, may bring the module
    own = [x for place in places for x in (*place.glob("*.py"), place / top / "__init__.py")]
    may_set = [python.script, *own]
    deeper = [f"{'*/' * depth}{top}{end}" for depth in (1, 2) for end in ("", ".py")]
    is_deeper = not has_top and any(next(python.folder.glob(x), None) for x in deeper)
    if is_deeper or any(_SETS_PATH.search(_text(file)) for file in may_set):
        return ""
    here = {
        path.stem
        for place in places
        for path in place.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    alike = difflib.get_close_matches(top, sorted(here), n=3)
    near = f"; nearest in its folder: {', '.join(alike)}" if alike else ""
    return f"there is no module {module} where the script looks{near}"


def _places(python: _Python) -> list[Path]:
    """Return the folders of the user's in which the script looks for modules."""
    return [x for x in dict.fromkeys((python.first, python.folder)) if x.is_dir()]


def _names_in(file: Path) -> set[str] | None:
    """Return the names that a module's source binds; None if it may have others."""
    text = _text(file)
    try:
        names = set(_bound_by(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):  # as of a newer Python's
        return None
    return None if "*" in names or _MAKES_NAMES.search(text) else names


def _bound_by(node: ast.AST) -> Iterator[str]:
    """Yield what a module's source binds at its top level, in whatever branch."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
        yield from (
            x for each in ast.walk(node) if isinstance(each, ast.Global) for x in each.names
        )
        return
    if isinstance(node, ast.alias):
        yield (node.asname or node.name).partition(".")[0]
    elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    elif isinstance(node, ast.MatchAs | ast.MatchStar | ast.MatchMapping):
        yield str(node.rest if isinstance(node, ast.MatchMapping) else node.name)
    for child in ast.iter_child_nodes(node):
        yield from _bound_by(child)


def _text(file: Path) -> str:
    """Return what a source file holds; empty if it can't be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
