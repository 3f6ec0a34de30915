"""The commit and the changes of the folder that a run was started in: recorded, never compared.

What decides a run's bits is hashed (`identity`); a commit tells a reader later what was hashed.

The folder may be anybody's, and git runs what a repository's config names: each such way is shut.
Without its filters a file that one of them keeps in another form (as Git LFS does) may be shown as
changed. Variables as GIT_DIR, which would point git at another repository, are not handed on.
"""

import contextlib
import hashlib
import os
import signal
import subprocess
import time
from pathlib import Path

__all__ = ["git_state"]

_SECONDS = 1.0
"""For all of it: a large repository on a slow disk may take longer, and no run waits for that."""
_LONGEST = 50_000
"""Characters of a diff that are kept: every checkpoint carries them."""

_KEPT = ("GIT_CEILING_DIRECTORIES", "GIT_DISCOVERY_ACROSS_FILESYSTEM")
"""Variables that say where the search for a repository ends."""
_OFF = {
    "core.fsmonitor": "false",  # a program that knows what has changed
    "core.hooksPath": os.devnull,
    "protocol.allow": "never",  # a partial clone would fetch, by the program that it names
}
"""Settings through which a repository could have a program run."""
_DIFF = (
    *("diff", "HEAD", "--no-color", "--no-ext-diff", "--no-textconv"),
    # git would run `git status` in each submodule, with the filters of that one's config
    *("--ignore-submodules=dirty", "--submodule=short"),
)


def git_state(folder: Path) -> dict[str, str]:
    """Return `commit`, and `diff` with its `diff_sha256` where tracked files have changed.

    Empty outside of a repository and without git; `diff` says so where git was too slow.
    """
    deadline = time.monotonic() + _SECONDS
    commit = _git(folder, deadline, _OFF, "rev-parse", "HEAD")
    if not commit:
        return {}
    found = {"commit": commit.decode().strip()}
    filters = _git(folder, deadline, _OFF, "config", "--null", "--name-only", "--list")
    diff = None
    if filters is not None:
        diff = _git(folder, deadline, {**_OFF, **_without_filters(filters)}, *_DIFF)
    if diff is None:
        return {**found, "diff": "not on record: git failed or was too slow"}
    if diff:
        found["diff_sha256"] = hashlib.sha256(diff).hexdigest()
        found["diff"] = diff.decode(errors="replace")[:_LONGEST]
    return found


def _without_filters(names: bytes) -> dict[str, str]:
    """Return settings that switch each filter off; `names` are all that git is configured with."""
    keys = [os.fsdecode(name) for name in names.split(b"\0") if name.startswith(b"filter.")]
    drivers = {key.rpartition(".")[0] for key in keys}
    return {
        f"{driver}.{key}": value
        for driver in sorted(drivers)
        for key, value in (("clean", ""), ("process", ""), ("required", "false"))
    }


def _git(folder: Path, deadline: float, settings: dict[str, str], *command: str) -> bytes | None:
    """Return what git prints; None if it fails, or has not ended by the deadline."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("GIT_") or name in _KEPT
    }
    environment |= {
        "GIT_OPTIONAL_LOCKS": "0",  # git would write the refreshed index into the repository
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_CONFIG_COUNT": str(len(settings)),
    }
    # not by `-c`, which would part a filter's name at an equals sign
    for index, (name, value) in enumerate(settings.items()):
        environment |= {f"GIT_CONFIG_KEY_{index}": name, f"GIT_CONFIG_VALUE_{index}": value}
    try:
        process = subprocess.Popen(
            ["git", "-C", str(folder), *command],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
        )
    except OSError:
        return None
    with process:
        try:
            printed, _ = process.communicate(timeout=max(deadline - time.monotonic(), 0))
        except subprocess.TimeoutExpired:
            # what git itself has started holds the pipe, and would outlive it
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return None
    return printed if process.returncode == 0 else None
