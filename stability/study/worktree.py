"""Checks a git commit out into a folder of its own; the user's checkout is left as it is.

A commit's folder is kept, so that what its `setup` has built is built once. Leaves out what is run
there (`foreign`).
"""

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path, PurePath

from stability.config.masking import without_secrets

__all__ = ["checkout", "commit_of", "repository", "sources_outside"]

_RESULTS = (".bin", ".csv", ".jsonl", ".log", ".npy", ".npz", ".out", ".pkl", ".png", ".pt", ".pth")
_RESULTS += (".safetensors", ".svg", ".tsv", ".txt")
"""How the name of a file ends that a run may have written: no source, and no setting."""


def repository(folder: Path) -> Path:
    """Return the root of the checkout that `folder` lies in; ValueError if it lies in none."""
    found = _git(folder, "rev-parse", "--show-toplevel")
    if found.returncode:
        raise ValueError(f"ref: {folder}: must lie in a git checkout: {_last_line(found.stderr)}")
    return Path(found.stdout.strip())


def commit_of(ref: str, folder: Path) -> str:
    """Return the full hash of the commit that `ref` names in the checkout that holds `folder`.

    ValueError if there is no such commit.
    """
    root = repository(folder)
    found = _git(root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{ref}^{{commit}}")
    if found.returncode:
        raise ValueError(f"ref: must be a commit of {root}, got {ref!r}")
    return found.stdout.strip()


def checkout(commit: str, folder: Path, setup: str = "") -> Path:
    """Return the folder in which `commit` is checked out; the one that is `folder` in it.

    It is made, and `setup` run in its root, if that has not been done. ValueError if either fails,
    or if a file of the commit was edited there since.
    """
    root = repository(folder)
    of_root = hashlib.sha256(f"{root}\0{setup}".encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    place = cache / "training-stability" / "worktrees" / f"{root.name}-{commit[:12]}-{of_root}"
    place.parent.mkdir(parents=True, exist_ok=True)
    ready = place.with_name(f"{place.name}.ready")
    with place.with_name(f"{place.name}.lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # until it is closed: two studies may want one commit
        if not ready.exists() or not place.is_dir():
            ready.unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            _git(root, "worktree", "prune")
            made = _git(root, "worktree", "add", "--detach", str(place), commit)
            if made.returncode:
                raise ValueError(f"ref: {commit[:12]}: {_last_line(made.stderr)}")
            _set_up(setup, place)
            ready.write_text(_edits(place, commit), encoding="utf-8")
        # an empty one is of a clean checkout; what `setup` itself has changed is its own
        elif _edits(place, commit) != (was := ready.read_text(encoding="utf-8")):
            changed = [] if was else _changed(place, commit)
            if not changed or any(map(_is_source, changed)):
                raise ValueError(
                    f"ref: {place}: must hold commit {commit[:12]} as it was checked out, was "
                    "edited since; undo the edits, or commit them and name that commit"
                )
            # a run has written over what is no source, as its results: each begins as checked out
            _git(place, "checkout", "--quiet", commit, "--", *changed)
    return place / folder.resolve().relative_to(root.resolve())


def sources_outside(files: Iterable[str], root: Path, worktree: Path) -> list[str]:
    """Return those of the executed `files` that lie in the checkout `root`, not in `worktree`."""
    own, other = worktree.resolve(), root.resolve()
    paths = (Path(file).resolve() for file in files)
    return sorted(
        str(path) for path in paths if path.is_relative_to(other) and not path.is_relative_to(own)
    )


def _edits(place: Path, commit: str) -> str:
    """Return a hash of what tracked files of a checkout have otherwise; empty for nothing."""
    found = _git(place, "diff", "--no-ext-diff", "--binary", commit, "--")
    if found.returncode:
        raise ValueError(f"ref: {place}: {_last_line(found.stderr)}")
    return hashlib.sha256(found.stdout.encode()).hexdigest() if found.stdout else ""


def _changed(place: Path, commit: str) -> list[str]:
    """Return the tracked files of a checkout that are not the commit's."""
    return _git(place, "diff", "--name-only", "-z", commit, "--").stdout.split("\0")[:-1]


def _is_source(name: str) -> bool:
    return PurePath(name).suffix.lower() not in _RESULTS


def _set_up(setup: str, place: Path) -> None:
    if not setup:
        return
    ran = subprocess.run(shlex.split(setup), cwd=place, capture_output=True, text=True, check=False)
    if ran.returncode:
        said = _last_line(ran.stderr) or _last_line(ran.stdout)
        said = f"setup: {setup!r} ended with exit code {ran.returncode}: {said}"
        raise ValueError(without_secrets(said, shlex.split(setup), {}))


def _git(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
    try:
        return subprocess.run(
            ["git", *words],
            cwd=folder,
            capture_output=True,
            text=True,
            errors="backslashreplace",  # a source may be in any encoding
            check=False,
        )
    except FileNotFoundError as error:
        raise ValueError("ref: needs git, which is not installed") from error


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
