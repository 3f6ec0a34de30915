"""What the frozen numerics share: checks of allowed values, formats by name, their text.

Every message reads "<class>: <field> must be <rule>, got <value>". Leaves out what the fields mean.
"""

import difflib
import json
import math
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import torch

from attention_kernels.formats import FORMATS, INPUT_DTYPES, format_named

__all__ = [
    "Written",
    "check_choice",
    "check_flag",
    "check_formats",
    "check_integer",
    "check_number",
    "input_format",
    "resolved",
    "unknown_field",
    "work_dtype",
]


class Written:
    """Base of numerics that carry themselves as text, by which `torch.compile` can tell them apart.

    It compares strings by value; frozen dataclasses not at all (torch 2.11), or by an identity that
    the next object can inherit from one that is gone.
    """

    text: str
    """The fields by name, as JSON."""

    def _write(self, values: dict[str, Any]) -> None:
        object.__setattr__(self, "text", json.dumps(values))


def input_format(dtype: torch.dtype) -> str:
    """Name of the format that `dtype` stores; ValueError if q, k and v can't have it."""
    if dtype not in INPUT_DTYPES:
        allowed = ", ".join(INPUT_DTYPES.values())
        raise ValueError(f"input_format: dtype must be one of {allowed}, got {dtype}")
    return INPUT_DTYPES[dtype]


def check_formats(group: Any, *others: str) -> None:
    """Raise ValueError unless every field of `group` but `others` names a format or is "input"."""
    for point in fields(group):
        name = getattr(group, point.name)
        if point.name in others or name == "input":
            continue
        try:
            format_named(name)
        except (ValueError, TypeError) as error:
            allowed = ["input", *FORMATS]
            near = difflib.get_close_matches(str(name), allowed, n=3, cutoff=0.4) or allowed
            raise ValueError(
                f"{type(group).__name__}: {point.name} must be a format, got {name!r}; "
                f"nearest: {', '.join(near)}"
            ) from error


def check_choice(group: Any, name: str, allowed: tuple[Any, ...]) -> None:
    """Raise ValueError unless the field is one of `allowed`."""
    value = getattr(group, name)
    if isinstance(value, bool) or value not in allowed:
        listed = allowed if isinstance(allowed[0], int) else ", ".join(allowed)
        raise ValueError(f"{type(group).__name__}: {name} must be one of {listed}, got {value!r}")


def check_flag(group: Any, name: str) -> None:
    """Raise ValueError unless the field is true or false."""
    value = getattr(group, name)
    if not isinstance(value, bool):
        raise ValueError(f"{type(group).__name__}: {name} must be true or false, got {value!r}")


def check_number(group: Any, name: str, *, low: float) -> None:
    """Raise ValueError unless the field is a finite number of at least `low`."""
    value = getattr(group, name)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (number and math.isfinite(value) and value >= low):
        raise ValueError(
            f"{type(group).__name__}: {name} must be a finite number of at least {low:g}, "
            f"got {value!r}"
        )


def check_integer(group: Any, name: str, *, low: int, high: int) -> None:
    """Raise ValueError unless the field is an integer from `low` to `high`."""
    value = getattr(group, name)
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(
            f"{type(group).__name__}: {name} must be an integer from {low} to {high}, got {value!r}"
        )


def unknown_field(function: str, name: str, allowed: Iterable[str]) -> ValueError:
    """Return the error that says there is no such field, with the nearest ones."""
    allowed = list(allowed)
    near = difflib.get_close_matches(name, allowed, n=3, cutoff=0.4) or allowed
    return ValueError(f"{function}: no field {name!r}; nearest: {', '.join(near)}")


def resolved(group: Any, dtype: torch.dtype) -> Any:
    """Return a copy of `group` in which "input" is replaced by the format of `dtype`."""
    name = input_format(dtype)
    changes = {f.name: name for f in fields(group) if getattr(group, f.name) == "input"}
    return replace(group, **changes)


def work_dtype(points: Iterable[str]) -> torch.dtype:
    """Return FP32 if it holds every named format, else FP64."""
    narrow = all(format_named(point).fits(FORMATS["fp32"]) for point in points)
    return torch.float32 if narrow else torch.float64
