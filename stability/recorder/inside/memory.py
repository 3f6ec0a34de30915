"""The most memory that this process has held: the host's, and of a GPU.

Runs in the process of a user's script.
"""

import resource
import sys
from typing import Dict

import torch

__all__ = ["most_memory"]


def most_memory() -> Dict[str, int]:
    """Return the most bytes held so far, of the `host` and, where CUDA is in use, of its `gpu`."""
    found = {"host": _of_host()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # what the allocator has taken, as other programs see it
        found["gpu"] = torch.cuda.max_memory_reserved()
    return found


def _of_host() -> int:
    """Return the peak of this program's pages in memory, in bytes."""
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            kib = next(line.split()[1] for line in file if line.startswith("VmHWM:"))
        return 1024 * int(kib)
    except (OSError, StopIteration):
        # counts the pages of the process that has started this one, too
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
