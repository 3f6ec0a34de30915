"""Holds the dtypes of a training's start weights against the baseline's, which no hash names.

Leaves out the weights' values (`taken_start`) and where the baseline's dtypes come from: the
command that started the training has put them into a file.
"""

from __future__ import annotations

import json
from typing import Dict, Mapping

__all__ = ["other_dtypes", "read_dtypes"]


def read_dtypes(path: str) -> Dict[str, str]:
    """Return the baseline's dtypes by weight, as `float32`; none for an empty path."""
    if not path:
        return {}
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def other_dtypes(own: Mapping[str, str], baseline: Mapping[str, str]) -> str:
    """Return which of the weights that both have is of another dtype, as a sentence; "" if none."""
    others = [name for name in own if name in baseline and own[name] != baseline[name]]
    if not others:
        return ""
    first = others[0]
    more = f", and {len(others) - 1} more" if len(others) > 1 else ""
    return (
        f"start weights must have the baseline's dtypes, {first} is {own[first]} and not "
        f"{baseline[first]}{more}; let the arm compute in another precision, as by autocast, on "
        "weights of the baseline's dtype"
    )
