"""What every sum over two results shares: their layout, chunks that fit a cache, and padding.

Results are taken as `(groups, length, head_dim)`, a group being one head of one sequence. Leaves
out which sums are formed (`deviation`, `golden_error`).
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = [
    "ULP_FLOOR",
    "all_finite",
    "check_shapes",
    "chunks",
    "grouped",
    "relative_size",
    "rows_inside",
    "squared_norms",
    "zero_sums",
]

ULP_FLOOR = 2.0**-4
"""An error is measured in ULPs at max(|r|, ULP_FLOOR * RMS), the RMS over all valid finite r.

One floor holds for all heads and ranges of a layer, and for all results that are compared with that
reference. Without it nothing else is seen: where r is next to zero by cancellation, as in dq of the
first position under a causal mask, the terms that r is the sum of are not small, nor are their
rounding errors. At r itself a harmless error is 1e23 ULPs, and a mean over values tells of nothing
else. LAPACK's test ratios go further, to units of roundoff at the norm of the whole result; a floor
under the ULPs of single values is ours. Of normally distributed r, 5 % lie below it; a head a
hundred times smaller than the others lies there whole.
"""

CHUNK = 2**17
"""Values a chunk on the CPU, 1 MiB in FP64: smaller ones cost more calls, larger ones the cache."""


def check_shapes(function: str, tensors: dict[str, Tensor]) -> None:
    """ValueError, which opens with the function's name, for unequal or empty shapes."""
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(set(shapes)) > 1 or 0 in shapes[0]:
        raise ValueError(
            f"{function}: {', '.join(tensors)} must have one shape and hold values, got "
            f"{', '.join(map(str, shapes))}; compare results on the same inputs"
        )


def rows_inside(x: Tensor, valid: Tensor | None, function: str = "compare") -> Tensor | None:
    """Return which rows are no padding, grouped as in `grouped`; None if all are."""
    if valid is None:
        return None
    try:
        if valid.dtype == torch.bool:
            rows = valid.expand(x.shape[:-1])
            return rows.reshape(1, -1) if x.dim() < 3 else rows.reshape(-1, x.shape[-2])
    except RuntimeError:
        pass  # does not broadcast
    raise ValueError(
        f"{function}: valid must be bool and broadcast to {tuple(x.shape[:-1])}, got "
        f"{valid.dtype} {tuple(valid.shape)}; give one flag for each position"
    )


def zero_sums(fields: int, x: Tensor, ranges: Sequence[range]) -> Tensor:
    """Return FP64 zeros on the device of x, `(fields, groups, ranges)`."""
    return x.new_zeros((fields, x.shape[0], len(ranges)), dtype=torch.float64)


def chunks(x: Tensor, ranges: Sequence[range]) -> Iterator[tuple[slice, slice, int]]:
    """Yield (groups, rows, index of their range): small chunks on the CPU, whole ranges else."""
    groups, _, head_dim = x.shape
    # chunks serve the CPU's cache; a device gets each range in one piece, with fewer launches
    limit = CHUNK if x.device.type == "cpu" else max(1, x.numel())
    for index, positions in enumerate(ranges):
        step = max(1, min(len(positions), limit // head_dim))
        together = max(1, limit // (step * head_dim))
        for start in range(positions.start, positions.stop, step):
            rows = slice(start, min(start + step, positions.stop))
            for first in range(0, groups, together):
                yield slice(first, first + together), rows, index


def all_finite(sums: Tensor) -> bool:
    """Say whether no value was infinite or NaN; false where saying so would wait for a device."""
    return sums.device.type == "cpu" and bool(torch.isfinite(sums).all())


def squared_norms(x: Tensor) -> Tensor:
    """Return the sum of squares of each group."""
    return torch.linalg.vector_norm(x, dim=(1, 2)).square_()


def grouped(x: Tensor) -> Tensor:
    """Return x as `(groups, length, head_dim)`, a view where its strides allow it."""
    if x.dim() < 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.reshape(-1, *x.shape[-2:])


def relative_size(error: Tensor, norm: Tensor) -> Tensor:
    """Return error / norm; no error at all is 0 also when the reference is zero."""
    return torch.where(error == 0, 0.0, error / norm)
