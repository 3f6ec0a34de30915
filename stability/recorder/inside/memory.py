"""The most memory that this process has held: the host's, and of a GPU.

Runs in the process of a user's script.
"""

import sys
from pathlib import Path
from typing import Dict

import torch

__all__ = ["most_memory"]


def most_memory() -> Dict[str, int]:
    """Return the most bytes held so far, of the `host` and, where CUDA is in use, of its `gpu`."""
    found = {"host": _of_host()}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        # of what torch's allocator has taken: CUDA itself takes some more
        count = torch.cuda.device_count()
        found["gpu"] = max(torch.cuda.max_memory_reserved(place) for place in range(count))
    return found


def _of_host() -> int:
    """Return the peak of this program's pages in memory, in bytes."""
    try:
        status = Path("/proc/self/status").read_bytes()  # with the program's name, in any encoding
        return 1024 * int(status.partition(b"VmHWM:")[2].split()[0])
    except (OSError, ValueError, IndexError):
        import resource  # of a call outside of a study nothing is to be loaded

        # counts the pages of the process that has started this one, too
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else 1024 * most
