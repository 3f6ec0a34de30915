"""What the log of a run that trains says last, without reading all of it."""

import json
import os
from pathlib import Path

__all__ = ["last_logged"]

TAIL = 2**18
"""Bytes that are read at most; a line of metrics has some hundreds, one with histograms more."""


def last_logged(log: Path, name: str) -> tuple[int, float] | None:
    """Return the last step at which the metric `name` was logged, and its value; None if not seen.

    For a display: checksums are not looked at.
    """
    try:
        with log.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            file.seek(max(0, size - TAIL))
            lines = file.read().split(b"\n")
    except OSError:
        return None
    for line in reversed(lines[:-1]):  # the last one may be torn
        try:
            content = json.loads(line)
            if name in content:
                return int(content["step"]), float(content[name])
        except (ValueError, TypeError, KeyError):  # the first one is cut where the tail begins
            continue
    return None
