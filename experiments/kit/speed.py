"""How fast an attention is on a CUDA device, in TFLOPS as flash-attn counts them.

4 B H T^2 D FLOPs forward, halved if causal, 2.5 times as many backward; the time is the median
between two events. Leaves out the benchmarks of our kernels (`kernels/benchmarks`), where
attentions take turns.
"""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from stability.probe.inputs import Inputs

__all__ = ["tflops"]

TURNS, WARM_UP = 20, 3


def tflops(
    attention: Callable[..., Tensor], inputs: Inputs, *, causal: bool
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
