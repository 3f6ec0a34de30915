"""The checkpoint that all arms of a command begin from: that it is there, and that it is one file.

Its checksum is part of a run's identity: another file under the same path is another start. Leaves
out how a command takes it (`{resume}`, `config.command_study`).
"""

import hashlib
import os
from pathlib import Path

from stability.records.manifest import read_manifest
from stability.study.foreign_plan import ForeignRun

__all__ = ["check_checkpoint", "checkpoint_entry"]

_ENTRY = "start"
"""The entry of a run's environment that holds the checksum."""


def check_checkpoint(run: ForeignRun) -> None:
    """ValueError if the checkpoint that a run is to begin from is not there."""
    start = run.config.get("start", "")
    if start and not Path(start).exists():
        raise ValueError(
            f"arms.{run.arm}.start: must be a checkpoint, {start!r} is no file and no folder"
        )


def checkpoint_entry(run: ForeignRun) -> dict[str, str]:
    """Return the checksum of the checkpoint that a run begins from; empty for none.

    ValueError if the baseline began from other bytes of that name: nothing need run to know it.
    """
    start = run.config.get("start", "")
    if not start:
        return {}
    check_checkpoint(run)
    found = _checksum(Path(start))
    if run.baseline is not None and run.baseline.manifest.exists():
        other = read_manifest(run.baseline.manifest)
        was = other.environment.get(_ENTRY, found)
        if other.config.get("start") == start and was != found:  # pyright: ignore
            raise ValueError(
                f"{run.arm}: start {start} must hold what the baseline began from, "
                f"{str(was)[:12]}, holds {found[:12]}: it was written since"
            )
    return {_ENTRY: found}


def _checksum(path: Path) -> str:
    """Return the SHA-256 of a file, or of all files of a folder with their names."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    digest = hashlib.sha256()
    for each in sorted(Path(top) / name for top, _, names in os.walk(path) for name in names):
        digest.update(f"{each.relative_to(path)}\0{_checksum(each)}\n".encode())
    return digest.hexdigest()
