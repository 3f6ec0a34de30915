"""The page of the Python that both packages offer, made of signatures and docstrings.

`stability docs python` shows it. On the site mkdocstrings makes a longer one of the same names.
"""

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any

__all__ = ["PUBLIC", "python_page"]

PUBLIC = ("stability", "attention_kernels")
"""The packages whose `__all__` is public."""
_HOOKS = ("_", "on_", "before_", "after_", "state_dict", "load_state_dict")
"""Begin the names of methods that a trainer calls, and nobody else."""


def python_page(words: str) -> str:
    """Return the page; `words` stand below its title."""
    parts = ["# Python\n", words]
    for package in PUBLIC:
        module = import_module(package)
        parts.append(f"## {package}\n")
        for name in module.__all__:
            parts += _of(name, getattr(module, name))
    return "\n".join(parts)


def _of(name: str, value: Any) -> Iterator[str]:
    """Give what is said of a public name: its signature, its docstring, its fields or methods."""
    heading = name.replace("__", r"\_\_")  # in Markdown two are bold
    yield f"### {heading}\n"
    if isinstance(value, str):
        yield f"`{value}`\n"
        return
    if isinstance(value, dict):
        yield f"By name: {', '.join(f'`{key}`' for key in value)}.\n"
        return
    node = _node(value)
    if isinstance(node, ast.FunctionDef):
        yield from _called(name, node)
        return
    assert isinstance(node, ast.ClassDef)
    methods = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
    if "__init__" in methods:
        yield from _called(name, methods["__init__"], ast.get_docstring(node) or "")
    else:
        yield f"{ast.get_docstring(node) or ''}\n"
        yield from _fields(node)
    for own, method in methods.items():
        if not own.startswith(_HOOKS) or own == "__call__":
            yield from _called(f"{name}.{own}", method)


def _node(value: Any) -> ast.stmt:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(value))).body
    return node


def _called(name: str, node: ast.FunctionDef, said: str = "") -> Iterator[str]:
    """Give how a function is called, as its source says it, and its docstring."""
    if any(isinstance(x, ast.Name) and x.id == "property" for x in node.decorator_list):
        yield f"`{name}`: {' '.join((ast.get_docstring(node) or '').split())}\n"
        return
    arguments = node.args
    taken = arguments.posonlyargs or arguments.args
    if taken and taken[0].arg == "self":
        del taken[0]
    inside = [*_arguments(arguments)]
    returned = f" -> {ast.unparse(node.returns)}" if node.returns is not None else ""
    lines = [f"{name}({', '.join(inside)}){returned}"]
    if len(lines[0]) > 76:
        lines = [f"{name}(", *(f"    {each}," for each in inside), f"){returned}"]
    yield "```python\n" + "\n".join(lines) + "\n```\n"
    said = said or ast.get_docstring(node) or ""
    # what follows these words is one item a line
    for heading in ("Args", "Raises"):
        said = said.replace(f"\n{heading}:\n", f"\n{heading}:\n\n")
    yield f"{_as_list(said)}\n"


def _arguments(given: ast.arguments) -> Iterator[str]:
    """Give each argument with its type and default."""
    first = [*given.posonlyargs, *given.args]
    unset: list[ast.expr | None] = [None] * (len(first) - len(given.defaults))
    for one, default in zip(first, [*unset, *given.defaults], strict=True):
        yield _argument(one, default)
    if given.vararg is not None:
        yield f"*{ast.unparse(given.vararg)}"
    elif given.kwonlyargs:
        yield "*"
    for one, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield _argument(one, default)
    if given.kwarg is not None:
        yield f"**{ast.unparse(given.kwarg)}"


def _argument(one: ast.arg, default: ast.expr | None) -> str:
    if default is None:
        return ast.unparse(one)
    return f"{ast.unparse(one)} = {ast.unparse(default)}"


def _as_list(said: str) -> str:
    """Return a docstring whose indented lines, one item each, are a list of Markdown."""
    lines: list[str] = []
    for line in said.splitlines():
        if line.startswith("        "):
            lines[-1] += f" {line.strip()}"
        elif line.startswith("    ") and line.strip().partition(":")[1]:
            lines.append(f"- {line.strip()}")
        else:
            lines.append(line)
    return "\n".join(lines)


def _fields(node: ast.ClassDef) -> Iterator[str]:
    """Give the fields of a class as a list, each with what stands below it."""
    found = []
    for one, after in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(one, ast.AnnAssign) or ast.unparse(one.target).startswith("_"):
            continue
        said = ""
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            said = f": {' '.join(str(after.value.value).split())}"
        found.append(f"- `{ast.unparse(one)}`{said}")
    if found:
        yield "\n".join(found) + "\n"
