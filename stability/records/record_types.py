"""Checks that a value read from JSON has the type that a record declares for it, however deep.

What a hint may be: Any, a scalar, Literal, a union, list, dict with str keys, a TypedDict, or
one of those Annotated with rules (`Count`, `Pair`). Types are strict: a bool is no int, but an int
is accepted for a float. Leaves out files (`sealed_json`) and what the values mean.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
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
    kind = _kind(hint)
    if kind.fields is not None:
        _check_fields(value, kind.hint, kind.fields, key)
    elif kind.is_union:
        _check_union(value, kind, key)
    elif not kind.holds(value):
        raise ValueError(f"{key} must be {_allowed(hint)}, is {_shown(value)}")
    elif kind.item is not Any:
        for name, item in value.items() if isinstance(value, dict) else enumerate(value):
            check_type(item, kind.item, f"{key}.{str(name)[:80]}")
    for rule in kind.rules:
        if not rule.holds(value):
            raise ValueError(f"{key} must be {rule.text}, is {_shown(value)}")


def _check_fields(value: Any, hint: Any, fields: Mapping[str, Any], key: str) -> None:
    """Check the keys that a TypedDict knows; a mapping may hold others, of another version."""
    if not isinstance(value, dict):
        raise ValueError(f"{key} must be of type dict, is {_shown(value)}")
    for name, kind in fields.items():
        if name in value:
            check_type(value[name], kind, f"{key}.{name}" if key else name)
        elif name in hint.__required_keys__:
            raise ValueError(f"{key} must have the key {name}, has {_shown(list(value))}")


def _check_union(value: Any, kind: "_Kind", key: str) -> None:
    for part in kind.args:
        try:
            check_type(value, part, key)
        except ValueError:
            continue
        return
    raise ValueError(f"{key} must be {_allowed(kind.hint)}, is {_shown(value)}")


@dataclass(frozen=True, slots=True)
class _Kind:
    """A hint taken apart, once for all values: this takes longer than to check one."""

    hint: Any
    """Without its rules."""
    rules: tuple[Rule, ...]
    origin: Any
    args: tuple[Any, ...]
    fields: Mapping[str, Any] | None
    """The hints of a TypedDict's keys; None for any other."""
    types: tuple[type, ...]
    """The types of which a value may be, if it is no union, no Literal and not Any."""

    @property
    def is_union(self) -> bool:
        return self.origin in (Union, UnionType)

    @property
    def item(self) -> Any:
        """The hint of what a list or dict holds; Any where nothing is said of it."""
        return self.args[-1] if self.origin in (list, dict) else Any

    def holds(self, value: Any) -> bool:
        """Whether a value is of this kind, no TypedDict or union; items are not looked at."""
        if self.hint is Any:
            return True
        if self.origin is Literal:
            # by type as well: True is 1, and 1.0 is
            return any(type(value) is type(x) and value == x for x in self.args)
        return type(value) in self.types


@cache
def _kind(hint: Any) -> _Kind:
    rules: tuple[Rule, ...] = ()
    while get_origin(hint) in (Annotated, Required, NotRequired):
        hint, *more = get_args(hint)
        rules = (*rules, *more)
    origin, is_fields = get_origin(hint), is_typeddict(hint)
    return _Kind(
        hint=hint,
        rules=rules,
        origin=origin,
        args=get_args(hint),
        fields=get_type_hints(hint, include_extras=True) if is_fields else None,
        types=(float, int) if hint is float else (origin or hint,),
    )


def _allowed(hint: Any) -> str:
    kind = _kind(hint)
    if kind.origin is Literal:
        return f"one of {kind.args}"
    if kind.is_union:
        return " or ".join(map(_allowed, kind.args))
    if kind.hint is NoneType:
        return "null"
    of = dict if kind.fields is not None else kind.origin or kind.hint
    return f"of type {of.__name__}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
