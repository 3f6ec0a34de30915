"""Speed of the measures on this machine: W1 against scipy's, and the drift of whole models.

    PYTHONPATH=.:kernels python benchmarks/metrics.py

Checks that both give the same number, then prints times and their ratio from one run. Leaves out
the kernels (`kernels/benchmarks`). Exit code 1 if W1 is wrong or less than 8 times faster.
"""

import platform
import sys
import time
from collections.abc import Callable

import numpy as np
import scipy
import torch
from scipy.stats import wasserstein_distance
from torch import Tensor

from stability.metrics import drift, wasserstein_1d

VALUES = 10_000_000
REQUIRED_RATIO = 8.0
REQUIRED_ERROR = 1e-6
TENSORS_PER_BLOCK = 4
BLOCKS = 15


def best_of(repeats: int, call: Callable[[], float]) -> tuple[float, float]:
    """Return the shortest wall time of `call` in seconds, and what it returned."""
    times, value = [], 0.0
    for _ in range(repeats):
        start = time.perf_counter()
        value = call()
        times.append(time.perf_counter() - start)
    return min(times), value


def model_state(values: int, seed: int) -> dict[str, Tensor]:
    """Return FP32 weights of about `values` values in 60 tensors: matrices, gains and biases."""
    generator = torch.Generator().manual_seed(seed)
    rows = values // BLOCKS // (TENSORS_PER_BLOCK - 2) // 64
    state = {}
    for block in range(BLOCKS):
        for name in ("attention", "mlp"):
            state[f"{block}.{name}"] = 0.02 * torch.randn(rows, 64, generator=generator)
        state[f"{block}.gain"] = 1 + 1e-3 * torch.randn(64, generator=generator)
        state[f"{block}.bias"] = torch.zeros(64)
    return state


def compare_w1() -> bool:
    """Print W1's time beside scipy's; return whether it is right and fast enough."""
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(VALUES, generator=generator)
    b = a + 1e-3 * torch.randn(VALUES, generator=generator)
    ours, value = best_of(3, lambda: wasserstein_1d(a, b))
    theirs, expected = best_of(1, lambda: float(wasserstein_distance(a.numpy(), b.numpy())))
    ratio, error = theirs / ours, abs(value - expected) / expected
    print(f"W1 of {VALUES:.0e} FP32 values   ours {ours:.3f} s   scipy {theirs:.3f} s")
    print(f"  ratio {ratio:.1f}x (>= {REQUIRED_RATIO:g}x)   relative difference {error:.1e}")
    return ratio >= REQUIRED_RATIO and error <= REQUIRED_ERROR


def sorted_once(*states: dict[str, Tensor]) -> float:
    """Sort a copy of each parameter, and no more."""
    for state in states:
        for tensor in state.values():
            tensor.flatten().clone().numpy().sort()
    return 0.0


def time_drift(values: int) -> None:
    """Print the time of one drift between two models of about `values` weights, and bare sorts'."""
    a, b = model_state(values, 0), model_state(values, 1)
    copy = {name: tensor.clone() for name, tensor in b.items()}
    apart, _ = best_of(3, lambda: drift(a, b)["all"]["w1"])
    equal, _ = best_of(3, lambda: drift(copy, b)["all"]["w1"])
    bare, _ = best_of(3, lambda: sorted_once(a, b))
    print(
        f"drift of {values:.0e} weights in {len(b)} tensors   {apart:.3f} s, if equal {equal:.3f} s"
        f"   bare sorts {bare:.3f} s, ratio {apart / bare:.2f}x"
    )


def main() -> int:
    """Run all of it and return the exit code."""
    print(
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, "
        f"{platform.machine()}; torch {torch.__version__}, numpy {np.__version__}, "
        f"scipy {scipy.__version__}"
    )
    passed = compare_w1()
    time_drift(1_000_000)
    time_drift(10_000_000)
    time_drift(30_000_000)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
