"""The exact 1-D Wasserstein-1 distance between the values of two tensors.

For samples of one size it is mean |sort(a) - sort(b)|; for others the integral of |F_a^-1 - F_b^-1|
over the merged quantile grid. scipy computes the same by sorting three times in FP64; it is the
oracle in the tests. Leaves out position: W1 never exceeds the mean absolute difference, and is zero
for a permutation.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = ["pool", "sort_values_", "wasserstein_1d", "wasserstein_sorted"]

# Differences are widened to FP64 this many at a time, torch's own grain: they stay in the cache and
# on one thread, so the sum depends on no thread count.
_CHUNK = 2**15


def wasserstein_1d(a: Tensor, b: Tensor) -> float:
    """Return W1 between the flattened values of `a` and `b`, in their units.

    Inputs are unchanged, of any floating dtype and any two sizes. NaN anywhere gives NaN. Infinite
    values of one sign match each other at no distance; unmatched ones give infinity. ValueError if
    one is empty or holds no floating-point values.
    """
    return wasserstein_sorted(sort_values_(pool([a])), sort_values_(pool([b])))


def pool(tensors: Sequence[Tensor]) -> Tensor:
    """Return a copy of all values of `tensors`, flat and in order, on the first one's device.

    FP64 if any of them is, else FP32; either holds every value exactly. ValueError if one holds no
    floating-point values.
    """
    for tensor in tensors:
        if not tensor.is_floating_point():
            raise ValueError(
                f"wasserstein_1d: values must be floating-point, got {tensor.dtype}; convert them"
            )
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    sizes = [tensor.numel() for tensor in tensors]
    values = torch.empty(sum(sizes), dtype=wide, device=tensors[0].device)
    for part, tensor in zip(values.split(sizes), tensors, strict=True):
        part.view(tensor.shape).copy_(tensor.detach())
    return values


def sort_values_(values: Tensor) -> Tensor:
    """Sort a flat FP32 or FP64 tensor in place, ascending with NaN last, and return it.

    On a CPU numpy sorts: 1e7 FP32 values take it 0.06 s and torch, which also sorts indices, 1.6 s
    (2 cores with AVX-512, numpy 2.4, torch 2.13).
    """
    if values.device.type == "cpu":
        values.numpy().sort()
        return values
    return values.copy_(values.sort().values)


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
    edges = np.concatenate([np.arange(1, n + 1) * m, np.arange(1, m + 1) * n])
    edges.sort()  # np.union1d hashes first, and is 15 times slower at 2e7 edges
    widths = np.diff(edges, prepend=0)
    steps = widths > 0
    below, widths = torch.from_numpy(edges[steps] - 1), torch.from_numpy(widths[steps]).double()
    gaps = _gaps(a[below // m], b[below // n])
    return float(gaps.dot(widths / (n * m)))
