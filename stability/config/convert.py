"""Converts mappings to the config dataclasses and back, and names a mistake where it stands.

Types are strict: a bool is no int; but an int is accepted for a float, and a list for a tuple.
Leaves out files (`load`) and which values a field may hold: the dataclasses check those themselves
(`schema`).
"""

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = [
    "ConfigError",
    "Place",
    "from_dict",
    "from_mapping",
    "merge",
    "nearest",
    "repeated",
    "to_dict",
]

T = TypeVar("T")


class ConfigError(ValueError):
    """A mistake in a config: one line, `file: key.path: what is wrong`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value stands: the file it came from and its dotted path there.

    `overridden` holds the paths below `base` that the command line set; there, and in the groups
    around them, the path is shown as an option.
    """

    source: str
    path: str = ""
    overridden: Collection[str] = ()

    def at(self, key: str) -> "Place":
        """Return the place of `key` in this mapping."""
        path = f"{self.path}.{key}" if self.path else str(key)
        return Place(source=self.source, path=path, overridden=self.overridden)

    def error(self, problem: str) -> ConfigError:
        """Return, for raising, the error that says `problem` about this place."""
        path = self.path
        group, _, below = path.partition("base.")
        around = (
            f"{below}.".startswith(f"{key}.") or key.startswith(f"{below}.")
            for key in self.overridden
        )
        if below and not group and any(around):
            path = f"--{below}"
        parts = [part for part in (self.source, path) if part]
        return ConfigError(": ".join([*parts, " ".join(problem.split())]))


def nearest(name: object, names: Iterable[str]) -> str:
    """Return the names of `names` most like `name`, all of them if none is alike."""
    allowed = list(names)
    near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4)
    return ", ".join(near or allowed)


def repeated(values: Iterable[T]) -> T | None:
    """Return the first of `values` that was there before; None if all are different."""
    seen: set[T] = set()
    for value in values:
        if value in seen:
            return value
        seen.add(value)
    return None


def from_dict(cls: type[T], mapping: Any, where: str) -> T:
    """Build the config dataclass `cls` from `mapping`; `to_dict` undoes it exactly.

    ConfigError names `where`, the key and the nearest valid names.
    """
    return from_mapping(cls, mapping, Place(source=where))


def from_mapping(cls: type[T], mapping: Any, place: Place) -> T:
    """Build the dataclass `cls` from `mapping`, nested groups included.

    A field's metadata may give the `form` of its value, which is said where it has another type.
    None stands for an empty mapping. ConfigError names an unknown or missing key, a wrong type, or
    what the dataclass itself refuses.
    """
    content = {} if mapping is None else mapping
    if not isinstance(content, Mapping):
        raise place.error(f"must be a mapping, got {content!r}")
    hints = get_type_hints(cls)
    names = {field.name: field for field in fields(cls)}  # pyright: ignore[reportArgumentType]
    for key in content:
        if key not in names:
            raise place.at(key).error(f"unknown key; nearest: {nearest(key, names)}")
    for name, field in names.items():
        required = field.default is MISSING and field.default_factory is MISSING
        if required and name not in content:
            raise place.at(name).error("missing; it has no default")
    values = {
        key: _convert(value, hints[key], place.at(key), names[key].metadata.get("form", ""))
        for key, value in content.items()
    }
    try:
        return cls(**values)
    except ConfigError:
        raise
    except ValueError as error:
        owner = place.path.rpartition(".")[2]
        text = str(error).removeprefix(f"{owner}: ")
        name, colon, rest = text.partition(": ")
        if colon and name.partition(".")[0] in names:
            raise place.at(name).error(rest) from error
        raise place.error(text) from error


def _convert(value: Any, kind: Any, place: Place, form: str = "") -> Any:
    origin = get_origin(kind)
    if kind is Any:
        return value
    if is_dataclass(kind):
        return from_mapping(kind, value, place)  # pyright: ignore[reportArgumentType]
    if origin is Literal:
        return _convert_choice(value, get_args(kind), place)
    if origin is tuple:
        return _convert_tuple(value, get_args(kind), place)
    if origin is dict:
        return _convert_dict(value, get_args(kind)[1], place)
    allowed = get_args(kind) if origin in (Union, UnionType) else (kind,)
    return _convert_scalar(value, allowed, place, form)


def _convert_choice(value: Any, choices: tuple[str, ...], place: Place) -> str:
    if not isinstance(value, str) or value not in choices:
        raise place.error(
            f"must be a known name, got {value!r}; nearest: {nearest(value, choices)}"
        )
    return value


def _convert_tuple(value: Any, kinds: tuple[Any, ...], place: Place) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise place.error(f"must be a list, got {value!r}")
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(value)
    if len(value) != len(kinds):
        raise place.error(f"must be a list of {len(kinds)} values, got {value!r}")
    return tuple(
        _convert(item, kind, place.at(str(index)))
        for index, (item, kind) in enumerate(zip(value, kinds, strict=True))
    )


def _convert_dict(value: Any, kind: Any, place: Place) -> dict[str, Any]:
    content = {} if value is None else value
    if not isinstance(content, Mapping):
        raise place.error(f"must be a mapping, got {content!r}")
    for key in content:
        if not isinstance(key, str):
            raise place.at(key).error(f"the key must be a string, got {key!r}; quote it")
    return {key: _convert(item, kind, place.at(key)) for key, item in content.items()}


_WORDS = {int: "a whole number", float: "a number", str: "a string", bool: "true or false"}


def _convert_scalar(value: Any, allowed: tuple[type, ...], place: Place, form: str) -> Any:
    if type(value) in allowed:
        return value
    if float in allowed and type(value) is int:
        try:
            return float(value)
        except OverflowError as error:
            problem = "must be a number that FP64 holds, got one of 309 digits or more"
            raise place.error(problem) from error
    rule = " or ".join(_WORDS[kind] for kind in allowed)
    raise place.error(f"must be {rule}{form and f', {form}'}, got {value!r}")


def to_dict(value: Any) -> Any:
    """Return a config as what JSON can hold: dataclasses as dicts, tuples as lists."""
    if is_dataclass(value):
        return {field.name: to_dict(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {key: to_dict(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_dict(item) for item in value]
    return value


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return `below` with the values of `above` on top, mappings merged key by key."""
    merged = dict(below)
    for key, value in above.items():
        under = merged.get(key)
        if isinstance(under, Mapping) and (value is None or isinstance(value, Mapping)):
            merged[key] = merge(under, value or {})
        else:
            merged[key] = value
    return merged
