"""Puts a wrapper into the place of a function of torch's, and takes it out again."""

from __future__ import annotations

from typing import Any, Callable

__all__ = ["put"]


def put(owner: Any, name: str, wrapper: Any) -> Callable[[], None]:
    """Put a wrapper into its place; return what puts back what was there."""
    original = getattr(owner, name)
    setattr(owner, name, wrapper)

    def undo() -> None:
        # what somebody else has wrapped since stays, around ours
        if getattr(owner, name) is wrapper:
            setattr(owner, name, original)

    return undo
