"""How much memory a process can have here at the most: the machine's, its control group's, a GPU's.

It is what there is and not what is free now, since others may end before a study does; swap counts
too. Leaves out what a run needs (`memory_estimate`).
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Memory", "gpu_memory", "host_memory"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Some memory: its bytes, and whose it is, e.g. "this machine"."""

    bytes: int
    owner: str


def host_memory(root: Path = Path("/")) -> Memory | None:
    """Return what this process can have of RAM and swap, None where the system does not say.

    The system's files are read below `root`.
    """
    total = _physical(root)
    if total is None:
        return None
    whole = Memory(total, "this machine")
    groups = [Memory(limit, "this process's control group") for limit in _group_limits(root)]
    least = min((whole, *groups), key=lambda memory: memory.bytes)
    return Memory(least.bytes + _from_table(root, "SwapTotal", 0), least.owner)


def gpu_memory() -> Memory:
    """Return the memory of the GPU that has least."""
    sizes = [
        torch.cuda.get_device_properties(index).total_memory
        for index in range(torch.cuda.device_count())
    ]
    return Memory(min(sizes), "its GPU")


def _physical(root: Path) -> int | None:
    found = _from_table(root, "MemTotal", -1)
    if found > 0:
        return found
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):  # no such name on this system
        return None


def _from_table(root: Path, name: str, default: int) -> int:
    """Return an entry of /proc/meminfo, which is in KiB, in bytes."""
    for line in _lines(root / "proc/meminfo"):
        key, _, value = line.partition(":")
        if key == name and value.split():
            return int(value.split()[0]) * 1024
    return default


def _group_limits(root: Path) -> Iterator[int]:
    """Yield the limits of the control groups that this process is in, from its own up to all."""
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        # an empty list is version 2, which has one hierarchy for all
        base = mount / "memory" if controllers else mount
        name = "memory.limit_in_bytes" if controllers else "memory.max"
        own = Path(path.strip("/"))
        # in a container the path may be that outside of it: what is mounted is then its own group
        for folder in (own, *own.parents):
            for found in _lines(base / folder / name):
                if found.isdigit():  # "max" is none
                    yield int(found)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1]
    except OSError:  # another system, or not ours to read
        return []
