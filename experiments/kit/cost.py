"""What one attention call costs: TFLOPS on a CUDA device, and bytes at its peak on any.

TFLOPS are counted as flash-attn counts them: 4 B H T^2 D FLOPs forward, half of that if causal, and
2.5 times as many backward. The time is the median between two CUDA events. The benchmarks of our
own kernels, in which attentions take turns, are in `kernels/benchmarks`.

Memory is counted by the allocator. The resident size of a process would say less: freed memory may
stay with the process, and memory that stayed may be used again. On the CPU torch's profiler reports
every allocation; on CUDA the caching allocator keeps its own peak. Memory that libraries take from
elsewhere is not counted.
"""

import os
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.profiler import profile

from stability.probe.attention_inputs import AttentionInputs

__all__ = ["peak_allocation", "tflops"]

TURNS, WARM_UP = 20, 3


def tflops(
    attention: Callable[..., Tensor], inputs: AttentionInputs, *, causal: bool
) -> dict[str, dict[str, float]]:
    """Return milliseconds and TFLOPS of `forward` and `backward`."""
    batch, heads, query_len, head_dim = inputs.q.shape
    flops = 4 * batch * heads * query_len * inputs.k.shape[2] * head_dim / (1 + causal)
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    forward = partial(attention, *leaves, causal=causal)
    backward = partial(torch.autograd.grad, forward(), leaves, inputs.dout, retain_graph=True)
    found = {}
    for name, call, count in (("forward", forward, flops), ("backward", backward, 2.5 * flops)):
        time = _milliseconds(call)
        found[name] = {"milliseconds": time, "tflops": count / time / 1e9}
    return found


def _milliseconds(call: Callable[[], object]) -> float:
    found = []
    for _ in range(WARM_UP + TURNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return statistics.median(found[WARM_UP:])


def peak_allocation(call: Callable[[], object], device: str) -> int:
    """Return by how many bytes the memory in use on `device` rises at most while `call` runs."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    # Without this the profiler writes two lines to stderr each time; it reads it at its first use.
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
