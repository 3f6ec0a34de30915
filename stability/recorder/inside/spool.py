"""Writes what was seen of a training into a folder, a file a process.

The command that started the training reads it. `rank-<rank>-<pid>.jsonl` has a line for each fact;
`rank-<rank>-<pid>-step-<n>.pt` is the state after n updates, written under another name first.
Nothing is written before the first update, so that loader workers and other processes which don't
train leave nothing. A process that was forked from one that had not trained yet has a file of its
own; one that goes on with its parent's training is refused.
"""

from __future__ import annotations

import json
import os
from contextlib import contextmanager
from typing import Any, Dict, Iterator, Mapping, Optional

import torch
from torch import Tensor

from .given_start import StartRefused

__all__ = ["FORKED", "Spool"]


FORKED = (
    "a process was forked from one that had trained already, and goes on with that training: fork "
    "before the first update, or record one training at a time"
)


class Spool:
    """The file of this process in `folder`; made with the first line."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank = folder, rank
        self._made_by = os.getpid()
        self._pid: Optional[int] = None
        """Of the process that has written the first line."""
        self._is_refused = False

    @property
    def is_own(self) -> bool:
        """Whether no other process, of which this is a fork, has begun to write."""
        return self._pid in (None, os.getpid())

    @property
    def is_forked(self) -> bool:
        """Whether this process is a fork of the one that made the spool."""
        return os.getpid() != self._made_by

    def check_own(self) -> None:
        """Say, where this process is a fork of the one that has begun to write, that it trains."""
        if self.is_own or self._is_refused:
            return
        self._is_refused = True
        with open(f"{self._path_of(os.getpid())}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": "refused", "why": FORKED}) + "\n")

    def write(self, *lines: Dict[str, Any]) -> None:
        """Append a line of JSON for each."""
        if not self._is_open():
            return
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with open(f"{self._path_of(os.getpid())}.jsonl", "a", encoding="utf-8") as file:
            file.write(text)

    @contextmanager
    def telling_refusals(self) -> Iterator[None]:
        """Write down why a start was refused, before the process ends."""
        try:
            yield
        except StartRefused as error:
            self.write({"kind": "refused", "why": error.why})
            raise

    def save(self, step: int, state: Dict[str, Tensor]) -> str:
        """Write a state, whole or not at all, and return the file's name."""
        return self.keep(f"step-{step:08d}", state)

    def keep(self, what: str, state: Mapping[str, Any]) -> str:
        """Write tensors by name, whole or not at all, and return the file's name."""
        if not self._is_open():
            return ""
        path = f"{self._path_of(os.getpid())}-{what}.pt"
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        return os.path.basename(path)

    def _path_of(self, pid: int) -> str:
        return os.path.join(self._folder, f"rank-{self._rank}-{pid}")

    def _is_open(self) -> bool:
        """Whether this process may write; the first to do so has the spool."""
        if self._pid is None:
            self._pid = os.getpid()
        return self.is_own
