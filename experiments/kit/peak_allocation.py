"""How much memory a call takes at its highest, counted by the allocator, not by the machine.

The resident size of a process would say less: what was freed may stay, and what stays may be used
again. On the CPU torch's profiler reports every allocation; on CUDA the caching allocator keeps its
own peak. Leaves out memory that libraries take from elsewhere.
"""

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.profiler import profile

__all__ = ["peak_allocation"]


def peak_allocation(call: Callable[[], object], device: str) -> int:
    """Return by how many bytes the memory in use on `device` rises at most while `call` runs."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    # else the profiler writes two lines to stderr each time; it reads this when it is first used
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    run = profile(profile_memory=True)
    with run:
        call()
    assert run.kineto_results is not None
    events: Any = run.kineto_results.events()
    changes = [(each.start_ns(), each.nbytes()) for each in events if each.name() == "[memory]"]
    in_use = highest = 0
    for _, change in sorted(changes, key=lambda each: each[0]):
        in_use += change
        highest = max(highest, in_use)
    return highest
