"""What a call to `stability.record` is told, by its arguments or by variables of the environment.

A launcher sets the variables, and so they go before what the script has written. Each argument has
one, `STABILITY_` and its name in capitals. Leaves out what is made of it (`record_call`).
"""

import json
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

__all__ = ["Told", "told_by_variables", "variable_of"]


class Told(NamedTuple):
    """What a call is told of its run, by the names of its arguments."""

    study: str
    arm: str
    seed: int
    config: Mapping[str, Any] | Namespace | None
    change: str
    may_change: Sequence[str]
    role: str
    question: str
    steps: int
    snapshots: Sequence[int]
    nudge: Sequence[int]
    out: str
    optional: bool
    watch: bool


def told_by_variables(told: Told, variables: Mapping[str, str]) -> Told:
    """Return what a call is told, each of `variables` before the argument of its name.

    ValueError for a variable that can't be read.
    """
    found = {}
    for name in Told._fields:
        text = variables.get(variable_of(name))
        if text is not None:
            read, what = _READ.get(name, (str, "a text"))
            try:
                found[name] = read(text)
            except ValueError:
                raise ValueError(
                    f"stability.record: {variable_of(name)} must be {what}, got {text!r}"
                ) from None
    return told._replace(**found)


def variable_of(name: str) -> str:
    """Return the variable of an argument."""
    return f"STABILITY_{name.upper()}"


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.replace(",", " ").split())


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in _words(text))


def _switch(text: str) -> bool:
    if text not in ("0", "1"):
        raise ValueError
    return text == "1"


def _mapping(text: str) -> dict[str, Any]:
    found = json.loads(text)
    if not isinstance(found, dict):
        raise ValueError
    return found


_READ: dict[str, tuple[Callable[[str], Any], str]] = {
    "seed": (int, "a whole number"),
    "steps": (int, "a whole number"),
    "snapshots": (_numbers, "whole numbers"),
    "nudge": (_numbers, "whole numbers"),
    "may_change": (_words, "words"),
    "config": (_mapping, "a mapping in JSON"),
    "optional": (_switch, "1 or 0"),
    "watch": (_switch, "1 or 0"),
}
"""What reads a variable that is no text, and what it must be."""
