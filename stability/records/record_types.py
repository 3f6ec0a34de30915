"""Checks that a value read from JSON has the type that a record declares for it, however deep.

What a hint may be: Any, a scalar, Literal, a union, list, dict with str keys, a TypedDict, or
one of those Annotated with rules (`Count`, `Pair`). Types are strict: a bool is no int, but an int
is accepted for a float. Leaves out files (`sealed_json`) and what the values mean.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

__all__ = [
    "COUNT",
    "DEEPEST",
    "FILLED",
    "PAIR",
    "Count",
    "Number",
    "Pair",
    "Rule",
    "check_plain_json",
    "check_type",
]

DEEPEST = 64
"""Most levels of a record: ours have 8. Python's own limit lies at some hundreds."""
_LARGEST = 2**63
"""Whole numbers lie below; a number of thousands of digits is none that we have written."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a value must be besides its type."""

    text: str
    holds: Callable[[Any], bool]


COUNT = Rule(">= 0", lambda value: value >= 0)
FILLED = Rule("one value at least", bool)
PAIR = Rule("a pair of values", lambda value: len(value) == 2)

Count = Annotated[int, COUNT]
"""A step, a seed or a number of things."""
Pair = Annotated[list[Any], PAIR]
"""The baseline's value and another arm's."""
Number = float | Literal["nan", "inf", "-inf"]
"""A number as `jsonable` writes it."""


def check_plain_json(value: Any, deepest: int = DEEPEST) -> None:
    """ValueError, a clause, if JSON is nested deeper than any record, or a number is too large."""
    if isinstance(value, dict | list):
        if not deepest:
            raise ValueError("is nested too deep to be read")
        for item in value.values() if isinstance(value, dict) else value:
            check_plain_json(item, deepest - 1)
    elif type(value) is int and not -_LARGEST <= value < _LARGEST:
        raise ValueError("holds a whole number of more than 64 bits")


def check_type(value: Any, hint: Any, key: str) -> None:
    """ValueError, which names the key, the type and the value, if that is of another type."""
    hint, rules = _without_rules(hint)
    if is_typeddict(hint):
        _check_fields(value, hint, key)
    elif get_origin(hint) in (Union, UnionType):
        _check_union(value, hint, key)
    elif not _is_of(value, hint):
        raise ValueError(f"{key} must be {_allowed(hint)}, is {_shown(value)}")
    elif get_origin(hint) in (list, dict):
        _check_items(value, get_args(hint)[-1], key)
    for rule in rules:
        if not rule.holds(value):
            raise ValueError(f"{key} must be {rule.text}, is {_shown(value)}")


def _check_items(value: list[Any] | dict[str, Any], hint: Any, key: str) -> None:
    if hint is Any:
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, item in items:
        check_type(item, hint, f"{key}.{str(name)[:80]}")


def _check_fields(value: Any, hint: Any, key: str) -> None:
    """Check the keys that a TypedDict knows; a mapping may hold others, of another version."""
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be of type dict, is {_shown(value)}")
    for name, kind in get_type_hints(hint, include_extras=True).items():
        if name in value:
            check_type(value[name], kind, f"{key}.{name}" if key else name)
        elif name in hint.__required_keys__:
            raise ValueError(f"{key} must have the key {name}, has {_shown(list(value))}")


def _check_union(value: Any, hint: Any, key: str) -> None:
    for kind in get_args(hint):
        try:
            check_type(value, kind, key)
        except ValueError:
            continue
        return
    raise ValueError(f"{key} must be {_allowed(hint)}, is {_shown(value)}")


def _without_rules(hint: Any) -> tuple[Any, tuple[Rule, ...]]:
    rules: tuple[Rule, ...] = ()
    while get_origin(hint) in (Annotated, Required, NotRequired):
        hint, *more = get_args(hint)
        rules = (*rules, *more)
    return hint, rules


def _is_of(value: Any, hint: Any) -> bool:
    """Whether a value is of a hint, which is no TypedDict and no union; items are not looked at."""
    if hint is Any:
        return True
    if get_origin(hint) is Literal:
        # by type as well: True is 1, and 1.0 is
        return any(type(value) is type(x) and value == x for x in get_args(hint))
    kind = get_origin(hint) or hint
    return type(value) in ((float, int) if kind is float else (kind,))


def _allowed(hint: Any) -> str:
    hint, _ = _without_rules(hint)
    if get_origin(hint) is Literal:
        return f"one of {get_args(hint)}"
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(map(_allowed, get_args(hint)))
    if hint is NoneType:
        return "null"
    kind = dict if is_typeddict(hint) else get_origin(hint) or hint
    return f"of type {kind.__name__}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
