"""Where a job stands, in words that are those of no scheduler."""

from dataclasses import dataclass
from typing import Literal

__all__ = ["FINISH", "Key", "Standing"]

Key = tuple[str, int]
"""A run: its arm and seed."""

FINISH: Key = ("", 0)
"""The job that measures what follows the runs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """A job that has not ended."""

    id: str
    state: Literal["queued", "running"]
    node: str = ""
    since: str = ""
    """When it began, or was submitted, in ISO 8601; empty if that is not known."""
    reason: str = ""
    """Why it is queued."""
