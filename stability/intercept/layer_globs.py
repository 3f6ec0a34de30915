"""Globs of layer names: one that matches nothing is an error, not an empty choice.

A replacement that replaces nothing would end in the bits of the model without it, and look like
proof that the candidate does no harm.
"""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import nn

from stability.config.convert import nearest
from stability.intercept.layer_names import layer_names

__all__ = ["check_globs", "check_globs_of_calls"]

_SHOWN = 6


def check_globs(model: nn.Module, /, **globs: Sequence[str]) -> None:
    """ValueError for a glob, by its argument's name, that matches no module of `model`."""
    names = list(dict.fromkeys(layer_names(model).values()))
    for argument, patterns in globs.items():
        for pattern in patterns:
            # a later call of a module has #n behind its name
            of_module = pattern.partition("#")[0]
            if not _matches(of_module, names):
                raise ValueError(
                    f"shadow: {argument} must be globs of module names, got {pattern!r}, which "
                    f"matches none; nearest: {_near(of_module, names)}"
                )


def check_globs_of_calls(
    called: Iterable[str], /, of: str = "layers with attention", **globs: Sequence[str]
) -> None:
    """ValueError for a glob, by its argument's name, that matches none of the layers `called`."""
    names = list(called)
    for argument, patterns in globs.items():
        for pattern in patterns:
            if not _matches(pattern, names):
                near = f"nearest: {_near(pattern, names)}" if names else "none was called at all"
                raise ValueError(
                    f"shadow: {argument} must be globs of {of}, got {pattern!r}, "
                    f"which matches none that was called; {near}"
                )


def _near(pattern: str, names: Sequence[str]) -> str:
    if "*" in pattern:
        # of layers 0 to 31 a glob means all: layers.*.self_attn is nearer than any one of them
        globs = (re.sub(r"(?<![^.])[0-9]+(?![^.])", "*", name) for name in names)
        names = list(dict.fromkeys(globs))
    near = nearest(pattern, names).split(", ")
    return ", ".join(near[:_SHOWN]) + (", ..." if len(near) > _SHOWN else "")


def _matches(pattern: str, names: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names)
