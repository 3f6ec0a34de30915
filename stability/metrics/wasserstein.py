"""The exact 1-D Wasserstein-1 distance between the values of two tensors.

For samples of one size it is mean |sort(a) - sort(b)|; for others the integral of |F_a^-1 - F_b^-1|
over the merged quantile grid. scipy computes the same by sorting three times in FP64; it is the
oracle in the tests. Leaves out position: W1 never exceeds the mean absolute difference, and is zero
for a permutation.
"""

import numpy as np
import torch
from torch import Tensor

__all__ = ["sorted_values", "wasserstein_1d", "wasserstein_sorted"]

# Differences are widened to FP64 this many at a time: what is widened stays in the cache.
_CHUNK = 2**17


def wasserstein_1d(a: Tensor, b: Tensor) -> float:
    """Return W1 between the flattened values of `a` and `b`, in their units.

    Inputs are unchanged, of any floating dtype and any two sizes. NaN anywhere gives NaN. Infinite
    values of one sign match each other at no distance; unmatched ones give infinity. ValueError if
    one is empty or holds no floating-point values.
    """
    return wasserstein_sorted(sorted_values(a), sorted_values(b))


def sorted_values(x: Tensor) -> Tensor:
    """Return the values of x, flat and ascending, on x's device; FP64 stays, others become FP32.

    On a CPU numpy sorts: for 1e7 FP32 values it takes 0.06 s where torch takes 1.6 s (2 cores with
    AVX-512, numpy 2.4, torch 2.13), in place and with no indices. ValueError as `wasserstein_1d`.
    """
    if not x.is_floating_point():
        raise ValueError(
            f"wasserstein_1d: values must be floating-point, got {x.dtype}; convert them first"
        )
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    flat = x.detach().to(wide, copy=True, memory_format=torch.contiguous_format).view(-1)
    if flat.device.type != "cpu":
        return flat.sort().values
    flat.numpy().sort()
    return flat


def wasserstein_sorted(a: Tensor, b: Tensor) -> float:
    """Return W1 between two flat tensors that are sorted already; else as `wasserstein_1d`."""
    if a.numel() == 0 or b.numel() == 0:
        raise ValueError(
            f"wasserstein_1d: a and b must hold values, got {a.numel()} and {b.numel()} of them; "
            "leave empty tensors out"
        )
    if a.numel() != b.numel():
        return _unequal(a.double().cpu(), b.double().cpu())
    total = torch.zeros((), dtype=torch.float64, device=a.device)
    for first, second in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        total += _gaps(first.double(), second.double()).sum()
    return float(total / a.numel())


def _gaps(a: Tensor, b: Tensor) -> Tensor:
    """Return |a - b| where inf - inf is 0, not NaN."""
    return (a - b).abs_().masked_fill_(a == b, 0.0)


def _unequal(a: Tensor, b: Tensor) -> float:
    """Integrate |F_a^-1 - F_b^-1| over the quantiles at which either steps.

    Quantiles i/n and j/m are compared exactly as the integers i*m and j*n.
    """
    n, m = a.numel(), b.numel()
    edges = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    widths = torch.from_numpy(np.diff(edges, prepend=0)).double()
    below = torch.from_numpy(edges - 1)
    gaps = _gaps(a[below // m], b[below // n])
    return float(gaps.dot(widths / (n * m)))
