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

# Differences are widened to FP64 this many at a time, so that the extra memory stays small.
_CHUNK = 2**20


def wasserstein_1d(a: Tensor, b: Tensor) -> float:
    """Return W1 between the flattened values of `a` and `b`, in their units.

    Inputs are unchanged. NaN anywhere gives NaN. ValueError if one is empty.
    """
    return wasserstein_sorted(sorted_values(a), sorted_values(b))


def sorted_values(x: Tensor) -> Tensor:
    """Return the values of x, flat and ascending, on x's device; FP64 stays, others become FP32.

    On the CPU numpy sorts: its vectorised quicksort is several times faster than torch's.
    """
    flat = x.detach().flatten()
    flat = flat.to(flat.dtype if flat.dtype == torch.float64 else torch.float32, copy=True)
    if flat.device.type != "cpu":
        return flat.sort().values
    array = flat.numpy()
    array.sort()
    return flat


def wasserstein_sorted(a: Tensor, b: Tensor) -> float:
    """Return W1 between two flat tensors that are sorted already; else as `wasserstein_1d`."""
    if a.numel() == 0 or b.numel() == 0:
        raise ValueError(
            f"wasserstein_1d: a and b must hold values, got {a.numel()} and {b.numel()} of them"
        )
    if bool(torch.isnan(a[-1])) or bool(torch.isnan(b[-1])):
        return float("nan")  # NaN sorts last
    if a.numel() == b.numel():
        total = torch.zeros((), dtype=torch.float64, device=a.device)
        for first, second in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
            total += (first.double() - second.double()).abs_().sum()
        return float(total / a.numel())
    return _unequal(a.double().cpu().numpy(), b.double().cpu().numpy())


def _unequal(a: np.ndarray, b: np.ndarray) -> float:
    """Integrate |F_a^-1 - F_b^-1| over the quantiles at which either steps.

    Quantiles i/n and j/m are compared exactly as the integers i*m and j*n.
    """
    n, m = a.size, b.size
    edges = np.union1d(np.arange(1, n + 1) * m, np.arange(1, m + 1) * n)
    widths = np.diff(edges, prepend=0)
    gaps = np.abs(a[(edges - 1) // m] - b[(edges - 1) // n])
    return float(np.dot(gaps, widths) / (n * m))
