"""Where a fork's records lie, and the name that tells what it changes."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from stability.records.paths import RunPaths

__all__ = ["fork_name", "fork_place"]


def fork_place(parent: RunPaths) -> Path:
    """Return the folder of the forks of a study's runs; a fork of a fork lies there too."""
    study = parent.root.parent.parent
    # one of a command lies a folder deeper, beside the run that goes on unchanged
    above = (folder for folder in (study, study.parent) if folder.name == "forks")
    return next(above, study / "forks")


def fork_name(begin: str, changes: Mapping[str, Any], identity: Sequence[Any]) -> str:
    """Return a name that tells the change, `baseline.at-100.to-150.attention.profile-fa2.1b2c3d4e`.

    The end is a hash of the fork's whole `identity`, since the rest may be cut off.
    """
    end = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]
    words = re.sub(r"[^A-Za-z0-9.-]+", "-", ".".join(_words(changes))).strip("-.") or "same"
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', begin)}.{words}"[:55].rstrip("-.") + f".{end}"


def _words(changes: Mapping[str, Any], above: str = "") -> list[str]:
    words = []
    for key, value in changes.items():
        path = f"{above}.{key}" if above else str(key)
        words += _words(value, path) if isinstance(value, Mapping) else [f"{path}-{value}"]
    return words
