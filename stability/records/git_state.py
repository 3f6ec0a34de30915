"""The commit and the changes of the folder that a run was started in: recorded, never compared.

What decides a run's bits is hashed (`identity`); a commit tells a reader later what was hashed.
"""

import hashlib
import os
import subprocess
from pathlib import Path

__all__ = ["git_state"]

_SECONDS = 3.0
"""A large repository on a slow disk may take longer; no run waits for that."""
_LONGEST = 50_000
"""Characters of a diff that are kept: every checkpoint carries them."""


def git_state(folder: Path) -> dict[str, str]:
    """Return `commit`, and `diff` with its `diff_sha256` where tracked files have changed.

    Empty outside of a repository and without git; `diff` says so where git was too slow.
    """
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    found = {"commit": commit.decode().strip()}
    diff = _git(folder, "diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv")
    if diff is None:
        return {**found, "diff": "not on record: git failed or was too slow"}
    if diff:
        found["diff_sha256"] = hashlib.sha256(diff).hexdigest()
        found["diff"] = diff.decode(errors="replace")[:_LONGEST]
    return found


def _git(folder: Path, *command: str) -> bytes | None:
    """Return what git prints; None if it fails. It may run no program that the folder names."""
    guarded = ["git", "-c", "core.fsmonitor=false", "-C", str(folder), *command]
    # git would else write the refreshed index into the repository
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            guarded, capture_output=True, timeout=_SECONDS, env=environment, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
