"""Writes what was seen of a training into a folder, a file a process.

The command that started the training reads it. `rank-<rank>-<pid>.jsonl` has a line for each fact;
`rank-<rank>-<pid>-step-<n>.pt` is the state after n updates, written under another name first.
Nothing is written before the first update, so that loader workers and other processes which don't
train leave nothing.
"""

from __future__ import annotations

import json
import os
from typing import Any, Dict

import torch
from torch import Tensor

__all__ = ["Spool"]


class Spool:
    """The file of this process in `folder`; made with the first line."""

    def __init__(self, folder: str, rank: int) -> None:
        self._folder, self._rank, self._pid = folder, rank, os.getpid()
        self._path = os.path.join(folder, f"rank-{rank}-{self._pid}.jsonl")

    @property
    def is_own(self) -> bool:
        """Whether this is the process that made the spool, and not a fork of it."""
        return os.getpid() == self._pid

    def write(self, *lines: Dict[str, Any]) -> None:
        """Append a line of JSON for each."""
        text = "".join(json.dumps(line) + "\n" for line in lines)
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(text)

    def save(self, step: int, state: Dict[str, Tensor]) -> str:
        """Write a state, whole or not at all, and return the file's name."""
        return self.keep(f"step-{step:08d}", state)

    def keep(self, what: str, state: Dict[str, Tensor]) -> str:
        """Write tensors by name, whole or not at all, and return the file's name."""
        name = f"rank-{self._rank}-{self._pid}-{what}.pt"
        path = os.path.join(self._folder, name)
        torch.save(state, f"{path}.tmp")
        os.replace(f"{path}.tmp", path)
        return name
