"""The clock and the memory meter.

Attentions take turns inside one run, so that a slow minute of a shared machine falls on all of
them, and a time is the median of its turns. FLOPs are counted as flash-attn does: 4 B H T^2 D
forward, halved if causal, 2.5 times as many backward.
"""

import functools
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from registry import Inputs, draw, square
from torch import Tensor

from attention_kernels import flash_attention, golden_attention
from attention_kernels.testing import Shape, with_gradients

__all__ = ["Times", "flops", "golden_peak", "seconds", "take_turns", "timed", "twin_growth"]

Attention = Callable[..., Tensor]

MIN_GPU_SECONDS = 0.01
"""Calls are queued until they take this long, because one alone would time its launch."""
MAX_QUEUED = 40


class Times(NamedTuple):
    """Median seconds; backward is None where there is none."""

    forward: float
    backward: float | None

    @property
    def both(self) -> float:
        """Forward plus backward."""
        assert self.backward is not None
        return self.forward + self.backward


def flops(shape: Shape, *, causal: bool) -> float:
    """Return the forward's FLOPs as flash-attn counts them; the backward has 2.5 times as many."""
    full = 4 * shape.batch * shape.heads * shape.query_len * shape.key_len * shape.head_dim
    return full / 2 if causal else float(full)


def take_turns(
    calls: Mapping[str, tuple[Attention, Inputs]],
    *,
    rounds: int,
    forward_only: tuple[str, ...] = (),
) -> dict[str, Times]:
    """Time each named attention on its inputs, in turns, after one turn that warms up."""
    forward: dict[str, list[float]] = {name: [] for name in calls}
    backward: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 1):
        for name, (attention, inputs) in calls.items():
            ahead, back = _once(attention, inputs, name not in forward_only)
            if turn:
                forward[name].append(ahead)
                backward[name] += [] if back is None else [back]
    return {
        name: Times(
            statistics.median(forward[name]),
            statistics.median(backward[name]) if backward[name] else None,
        )
        for name in calls
    }


def _once(attention: Attention, inputs: Inputs, backward: bool) -> tuple[float, float | None]:
    """Return the seconds of a forward that could be differentiated, and of its backward."""
    leaves = (inputs.q, inputs.k, inputs.v)
    call = functools.partial(attention, *leaves, **inputs.mask)
    on_gpu = inputs.q.is_cuda
    if not backward:
        with torch.no_grad():
            return timed(call, on_gpu)[0], None
    ahead, out = timed(call, on_gpu)
    dout = inputs.dout.to(out.dtype)
    differentiate = functools.partial(torch.autograd.grad, out, leaves, dout, retain_graph=on_gpu)
    return ahead, timed(differentiate, on_gpu)[0]


def timed(call: Callable[[], Any], on_gpu: bool) -> tuple[float, Any]:
    """Return the seconds of a call and its result; on a GPU of one of several that are queued."""
    if not on_gpu:
        begin = time.perf_counter()
        result = call()
        return time.perf_counter() - begin, result
    result, alone = call(), _queued(call, 1)
    queued = max(1, min(MAX_QUEUED, int(MIN_GPU_SECONDS / alone)))
    return _queued(call, queued), result


def _queued(call: Callable[[], Any], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def seconds(call: Callable[[], object]) -> float:
    """Return the wall time of one call on the CPU."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


# Peak memory belongs to a process, so each measure is one: this file run with a name and a length.


def twin_growth(length: int) -> int:
    """Return by how many bytes a process grows in the twin's forward and backward at `length`."""
    return _child("twin", length)


def golden_peak(length: int) -> int:
    """Return the peak memory in bytes of a process that runs golden, forward and backward."""
    return _child("golden", length)


def _child(what: str, length: int) -> int:
    command = [sys.executable, str(Path(__file__)), what, str(length)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return int(done.stdout)


def _peak_bytes() -> int:
    """Return the peak of this process. Linux's ru_maxrss would begin at the peak of the parent."""
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if "VmHWM" in line)
        return int(line.split()[1]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _resident_bytes() -> int:
    statm = Path("/proc/self/statm")
    if not statm.is_file():
        return _peak_bytes()
    return int(statm.read_text().split()[1]) * resource.getpagesize()


def _differentiated(attention: Attention, inputs: Inputs, **options: object) -> None:
    with_gradients(attention, inputs.q, inputs.k, inputs.v, inputs.dout, **options)


def _run_child(what: str, length: int) -> int:
    if what == "golden":
        _differentiated(golden_attention, draw(square(1, 8, length, 128), "cpu"), causal=True)
        return _peak_bytes()
    twin = functools.partial(flash_attention, engine="twin")
    _differentiated(twin, draw(square(1, 16, 128, 64), "cpu"))  # loads what is loaded once
    before = _resident_bytes()
    _differentiated(twin, draw(square(1, 16, length, 64), "cpu"))
    return _peak_bytes() - before


if __name__ == "__main__":
    print(_run_child(sys.argv[1], int(sys.argv[2])))
