"""Reads how far a training has come, while its processes still write into their spool.

Leaves out what is made of the spool once they have ended (`spooled`).
"""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["SpoolTail", "telling_updates"]

Line = Mapping[str, Any]


@dataclass(slots=True)
class _File:
    """What was read of the file of one process."""

    size: int = 0
    rank: int | None = None
    """None before it has told; the file's own name may have another."""


class SpoolTail:
    """What the first rank has written into the spool in `folder` since it was last asked after."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[Path, _File] = {}

    def new_lines(self) -> list[Line]:
        """Return the lines that have come whole; what can't be read is passed over."""
        found: list[Line] = []
        for path in sorted(self._folder.glob("rank-*.jsonl")):
            file = self._files.setdefault(path, _File())
            if file.rank not in (None, 0):
                continue
            with suppress(OSError, ValueError):
                lines = _new_of(path, file)
                begins = [line for line in lines if line.get("kind") == "begin"]
                file.rank = begins[0].get("rank") if begins else file.rank
                found += lines if file.rank == 0 else []
        return found


def _new_of(path: Path, of: _File) -> list[Line]:
    with path.open("rb") as file:
        file.seek(of.size)
        # of a line that is being written the rest comes next time
        text, end, _ = file.read().rpartition(b"\n")
    of.size += len(text) + len(end)
    lines = [json.loads(line) for line in text.splitlines()]
    return [line for line in lines if isinstance(line, dict)]


def telling_updates(spool: Path, tell: Callable[[int, float | None], None]) -> Callable[[], None]:
    """Return what tells of the newest update, its number and loss, each time it is called.

    The loss is the first rank's; None where none was seen, and where there are several.
    """
    tail = SpoolTail(spool)

    def look() -> None:
        updates = [line for line in tail.new_lines() if line.get("kind") == "update"]
        if updates:
            losses = list(updates[-1]["losses"].values())
            tell(updates[-1]["step"], losses[0] if len(losses) == 1 else None)

    return look
