"""What the process of a training was started with: its arguments, the files they name, variables.

A shell script, a launcher or a user's shell may give a training what no word of the recorded
command says. All of it is noted before the script's first line, so that what the script does to its
arguments or variables itself, or writes into a file that is named, is told from what it was given.
Of variables there is a hash of each value and no value.

Leaves out what a script reads from files that no argument names, and folders. It needs the standard
library alone.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from typing import Any, Dict, Iterable, List, Optional

__all__ = ["NamedFiles", "Started", "hash_of", "names_in", "note_start", "started"]

_WHOLE = 2**26
"""Bytes of the largest file that is hashed as a whole; of others the first and last half of it."""
_MOST_BYTES = 2**30
"""Bytes that are read of all the files of one process; of the rest there are sizes and times."""
_MOST_LINES = 400
_LARGEST_TEXT = 2**18
"""Lines and bytes of a text whose lines are told apart."""
_CHUNK = 2**20


def hash_of(text: str) -> str:
    """Return a hash of a value that is on no record itself."""
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:16]


class NamedFiles:
    """The regular files that words name, in `folder`, as they are when this is made."""

    def __init__(self, words: Iterable[str], folder: str, programs: Iterable[str] = ()) -> None:
        """Of `programs`, which are among the words, no lines are told apart."""
        self._programs = set(programs)
        self._paths = {
            name: os.path.join(folder, name) for word in words for name in names_in(word)
        }
        self._begun = {name: _stat(path) for name, path in self._paths.items()}

    def hashes(self) -> Dict[str, Dict[str, Any]]:
        """Return what is known of each file that there was, by the name that it was given by."""
        found: Dict[str, Dict[str, Any]] = {}
        left = _MOST_BYTES
        for name, was in self._begun.items():
            if was is None:
                continue
            left -= min(was[0], _WHOLE)
            try:
                if left < 0:
                    found[name] = {"sha256": "", "of": "stat", "stat": was[:2]}
                else:
                    found[name] = _content(self._paths[name], was, name not in self._programs)
            except OSError:
                found[name] = {"sha256": "", "of": "unreadable"}
            if _stat(self._paths[name]) != was:
                found[name]["written"] = True
        return found

    def unread(self) -> Dict[str, Dict[str, Any]]:
        """Return which files there were, where another process reads them."""
        return {
            name: {"sha256": "", "of": "unread"}
            for name, was in self._begun.items()
            if was is not None
        }

    def written(self) -> List[str]:
        """Return the names of the files that were written, made or taken away since."""
        return [name for name, was in self._begun.items() if _stat(self._paths[name]) != was]


class Started:
    """What this process was given, as it is when this is made."""

    def __init__(self) -> None:
        self.time = time.time()
        self.arguments = [str(x) for x in getattr(sys, "argv", ())]
        self.folder = os.getcwd()
        self.variables = {
            name: hash_of(value)
            for name, value in os.environ.items()
            if not _is_torchs(name, value)
        }
        # a RANK alone may be the user's own, as of a low-rank adapter
        self._is_first = "WORLD_SIZE" not in os.environ or os.environ.get("RANK", "0") == "0"
        self._files: Optional[NamedFiles] = None
        self._told: Dict[str, Any] = {}

    def look(self) -> None:
        """Note which of the files that are named there are."""
        if self._files is None:
            self._files = NamedFiles(self.arguments, self.folder, self.arguments[:1])

    def told(self) -> Dict[str, Any]:
        """Return all of it, to be told before the first update."""
        self.look()
        assert self._files is not None
        if not self._told:
            self._told = {
                "arguments": self.arguments,
                "later_arguments": [str(x) for x in getattr(sys, "argv", ())],
                "main": _main(),
                "variables": self.variables,
                # the first rank's go on record, and all may share one slow disk
                "files": self._files.hashes() if self._is_first else self._files.unread(),
            }
        return self._told

    def written(self) -> List[str]:
        """Return the names of the files that were written since the process began."""
        return self._files.written() if self._files else []


_noted: List[Started] = []
"""Of this process; one that was forked has been given what its parent was."""


def note_start() -> None:
    """Note what this process was given; to be called before the script's first line."""
    _noted[:] = [Started()]


def started() -> Started:
    """Return what this process was given, as far as that was noted in time."""
    if not _noted:
        note_start()
    _noted[0].look()
    return _noted[0]


def _is_torchs(name: str, value: str) -> bool:
    """Whether torch has set a variable itself, as a process that imported it before this one."""
    if name != "TORCHINDUCTOR_CACHE_DIR":
        return False
    import tempfile  # it is in the way of each start of Python

    return value.startswith(os.path.join(tempfile.gettempdir(), "torchinductor_"))


def _main() -> str:
    """Return how the program is known: by its `file`, by the hash of its `code`, or not at all."""
    main = sys.modules.get("__main__")
    if os.path.isfile(getattr(main, "__file__", None) or ""):  # it may say "<stdin>"
        return "file"
    words: List[str] = list(getattr(sys, "orig_argv", ()))  # Python 3.10 and newer
    if "-c" in words[:-1]:
        return f"code {hash_of(words[words.index('-c') + 1])}"
    return ""


def names_in(word: str) -> List[str]:
    """Return what of a word may be the name of a file: itself, a flag's value, a list's members."""
    found = [word]
    if "=" in word:
        found.append(word.partition("=")[2])
    found += [part for each in found[:] for part in each.split(",") if part != each]
    return list(dict.fromkeys(each.lstrip("@") for each in found if each.lstrip("@")))


def _stat(path: str) -> Optional[List[int]]:
    """Return what of a file changes with it; None if there is no regular file of that name."""
    try:
        if not os.path.isfile(path):
            return None
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return [found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino]


def _content(path: str, stat: List[int], is_config: bool) -> Dict[str, Any]:
    size = stat[0]
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        if size <= _WHOLE:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                digest.update(chunk)
            found: Dict[str, Any] = {"sha256": digest.hexdigest(), "of": "whole"}
            lines = _lines(path, size) if is_config else None
            return found if lines is None else {**found, "lines": lines}
        for place in (0, size - _WHOLE // 2):
            file.seek(place)
            left = _WHOLE // 2
            while left:
                chunk = file.read(min(left, _CHUNK))
                left -= len(chunk)
                digest.update(chunk)
                if not chunk:
                    break
    # by its place on the disk and its times an untouched file is known again, without being read
    return {"sha256": digest.hexdigest(), "of": f"ends of {size} bytes", "stat": stat}


def _lines(path: str, size: int) -> Optional[List[str]]:
    """Return a hash of each line of a short text; None for what is no text, or a long one."""
    if size > _LARGEST_TEXT:
        return None
    with open(path, "rb") as file:
        text = file.read()
    # JSON may be one line
    lines = (text.replace(b",", b",\n") if path.endswith(".json") else text).splitlines()
    lines = [line.rstrip() for line in lines if line.strip()]
    if b"\0" in text or len(lines) > _MOST_LINES:
        return None
    return [hashlib.sha256(line).hexdigest()[:8] for line in lines]
