"""Reads how far a training has come, while its processes still write into their spool.

Leaves out what is made of the spool once they have ended (`spooled`).
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["SpoolTail", "telling_updates"]


class SpoolTail:
    """What the first rank has written into the spool in `folder` since it was last asked after."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, int] = {}
        """How many bytes of each file were read."""

    def new_lines(self) -> list[Mapping[str, Any]]:
        """Return the lines that have come whole."""
        paths = sorted(self._folder.glob("rank-0-*.jsonl"))
        return [line for path in paths for line in self._new_of(path)]

    def _new_of(self, path: Path) -> list[Mapping[str, Any]]:
        before = self._read.get(path, 0)
        with path.open("rb") as file:
            file.seek(before)
            # of a line that is being written the rest comes next time
            text, end, _ = file.read().rpartition(b"\n")
        self._read[path] = before + len(text) + len(end)
        return [json.loads(line) for line in text.splitlines()]


def telling_updates(spool: Path, tell: Callable[[int, float | None], None]) -> Callable[[], None]:
    """Return what tells of the newest update, its number and loss, each time it is called.

    The loss is the first rank's; None where none was seen, and where there are several.
    """
    tail = SpoolTail(spool)

    def look() -> None:
        updates = [line for line in tail.new_lines() if line["kind"] == "update"]
        if updates:
            losses = list(updates[-1]["losses"].values())
            tell(updates[-1]["step"], losses[0] if len(losses) == 1 else None)

    return look
