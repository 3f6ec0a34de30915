"""Errors of a candidate and a baseline attention against an FP64 golden on the same inputs.

This is what an attention is judged by: distance to a low-precision baseline contains the baseline's
own error. `error_ratio`, candidate error over baseline error, needs no tolerance of its own:
flash-attn's tests accept a kernel whose largest error is at most twice that of plain low-precision
PyTorch, and FlexAttention's tests, in low precision, one whose mean error is at most 1.1 times as
large. FlashInfer compares with fixed tolerances instead, which fit one format only. `gain`, the
slope of a result on the golden, less 1, finds a wrong factor far below the rounding noise, which
averages out in it: a softmax scale off by 0.5 % is 90 standard errors where the error ratio is 2.5.
`golden_bias_ulp` finds errors that keep one sign. Each comes with the baseline's own value, because
nobody can ask a candidate to be better than that.

Summed as in `deviation`: in FP64, on the device, in one pass, and nothing waits for the device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named, input_format
from stability.metrics.result_sums import (
    ULP_FLOOR,
    all_finite,
    check_shapes,
    chunks,
    grouped,
    relative_size,
    rows_inside,
    squared_norms,
    zero_sums,
)
from stability.metrics.ulp import inverse_power

__all__ = [
    "GOLDEN_COLUMNS",
    "PART_GOLDEN_COLUMNS",
    "GoldenSums",
    "golden_metrics",
    "golden_sums",
    "golden_tensor",
]

GOLDEN_COLUMNS = (
    "error_ratio",
    "golden_candidate_rel_fro",
    "golden_baseline_rel_fro",
    "gain",
    "gain_baseline",
    "golden_bias_ulp",
    "golden_bias_ulp_baseline",
    "baseline_over_rounding",
    "golden_nonfinite",
)
"""The further columns where a golden is given."""
PART_COLUMNS = ("rel_fro", "rmse", "max_abs", "bias", "bias_ulp", "bias_ulp_se", "nonfinite")
"""The columns for a single head or range of positions."""
PART_GOLDEN_COLUMNS = (
    "error_ratio",
    "gain",
    "gain_baseline",
    "golden_bias_ulp",
    "golden_bias_ulp_baseline",
    "baseline_over_rounding",
)
"""The further columns of a head or range where a golden is given: those it is judged by."""


def golden_tensor(
    candidate: Tensor, baseline: Tensor, golden: Tensor, *, valid: Tensor | None = None
) -> Tensor:
    """Return the metrics of `GOLDEN_COLUMNS`, in that order, as FP64 on the device.

    `error_ratio` = |candidate - golden| / |baseline - golden|, 1 where both are exact; the divisor
    is at least the error of rounding the golden once to the candidate's dtype, sqrt(sum ulp^2 /
    12), because a baseline may happen to be exact, as in the first position under a causal mask.
    The next two are each one's error relative to |golden|. `gain` = <candidate, golden> /
    |golden|^2 - 1, and `gain_baseline` that of the baseline. `golden_bias_ulp` and
    `golden_bias_ulp_baseline` are mean signed errors in ULPs of the candidate's dtype at
    max(|golden|, ULP_FLOOR * RMS), the RMS here that of one head of one sequence.
    `baseline_over_rounding` is the baseline's error over that of rounding once: where it is large,
    a ULP is a small unit. `golden_nonfinite` counts values of the candidate that are not finite
    where the golden is. Of all else, only positions where all three are finite count.

    `valid` as in `compare`. ValueError for unequal or empty shapes, a dtype that is no format, or a
    mask that does not fit.
    """
    check_shapes("golden_tensor", {"candidate": candidate, "baseline": baseline, "golden": golden})
    results = (grouped(candidate), grouped(baseline), grouped(golden))
    sums = golden_sums(*results, inside=rows_inside(candidate, valid, "golden_tensor"))
    return golden_metrics(GoldenSums(*(values.sum(dim=(0, 1)) for values in sums)))


class GoldenSums(NamedTuple):
    """Sums over the values that are finite in candidate, baseline and golden alike; but `nonfinite`
    is over all. c and b are the errors of candidate and baseline, g is the golden.
    """

    count: Tensor
    nonfinite: Tensor
    """Values of the candidate that are not finite where the golden is."""
    candidate: Tensor
    """sum c^2"""
    baseline: Tensor
    """sum b^2"""
    golden: Tensor
    """sum g^2"""
    candidate_product: Tensor
    """sum c g"""
    baseline_product: Tensor
    candidate_ulp: Tensor
    """sum of c in ULPs"""
    baseline_ulp: Tensor
    rounding: Tensor
    """sum ulp^2 / 12: the expected square of what rounding g once to the output dtype costs."""


def golden_sums(
    candidate: Tensor,
    baseline: Tensor,
    golden: Tensor,
    *,
    inside: Tensor | None = None,
    ranges: Sequence[range] | None = None,
    ulp: float = 0.0,
) -> GoldenSums:
    """Return the sums of each group's ranges; arguments as in `_error_sums` and `compare`."""
    ranges = ranges or [range(candidate.shape[1])]
    target = format_named(input_format(candidate.dtype))
    floor = _group_floors(golden, inside)
    table = zero_sums(len(GoldenSums._fields), candidate, ranges)
    for groups, rows, at in chunks(candidate, ranges):
        keep = None if inside is None else inside[groups, rows].unsqueeze(-1)
        c, b, g = (t[groups, rows].detach() for t in (candidate, baseline, golden))
        table[:, groups, at] += _sum_against_golden(c, b, g, keep, floor[groups], target, ulp)
    return GoldenSums(*table)


def _sum_against_golden(
    candidate: Tensor,
    baseline: Tensor,
    golden: Tensor,
    keep: Tensor | None,
    floor: Tensor,
    target: Format,
    ulp: float,
) -> Tensor:
    """Return the fields of `GoldenSums` of each group of a chunk, `(fields, groups)`."""
    # c, b, g and 1 / ulp side by side, so that one batched product makes all sums of products:
    # 1.4 times as fast as one by one
    size = (golden.shape[0], 4, *golden.shape[1:])
    rows = golden.new_empty(size, dtype=torch.float64)
    c, b, g, inverse = rows.unbind(1)
    g.copy_(golden)
    torch.sub(candidate, g, out=c)
    torch.sub(baseline, g, out=b)
    if ulp:
        inverse.fill_(1 / ulp)
    else:
        _fill_inverse_ulp(inverse, g, floor, target)
    flat = rows.flatten(2)
    products = flat @ flat.mT
    count = c.new_full((c.shape[0],), float(c[0].numel()))
    nonfinite, ok = torch.zeros_like(count), None
    # a sum of squares shows whether any value is not finite: most chunks need no mask
    if keep is not None or not all_finite(products):
        # a golden that is not finite has made both differences infinite or NaN
        ok = torch.isfinite(c) & torch.isfinite(b)
        wrong = torch.isfinite(g) & ~torch.isfinite(c)
        ok, wrong = (ok, wrong) if keep is None else (ok & keep, wrong & keep)
        rows.masked_fill_(~ok.unsqueeze(1), 0.0)
        count, nonfinite = ok.sum(dim=(1, 2)).double(), wrong.sum(dim=(1, 2)).double()
        products = flat @ flat.mT
    # powers of two: their reciprocals are exact
    ulps = inverse.reciprocal_()
    if ok is not None:
        ulps.masked_fill_(~ok, 0.0)
    chosen = products[:, (0, 1, 2, 0, 1, 0, 1), (0, 1, 2, 2, 2, 3, 3)]
    return torch.cat([torch.stack([count, nonfinite]), chosen.mT, squared_norms(ulps)[None] / 12])


def _fill_inverse_ulp(into: Tensor, golden: Tensor, floor: Tensor, target: Format) -> None:
    """Write 1 / ulp of `target` at max(|golden|, floor) into an FP64 tensor."""
    # FP32 has the exponents of every format but FP64, at half the memory
    wide = golden if target.mantissa_bits > 23 else golden.float()
    into.copy_(inverse_power(wide, floor, target)).mul_(2.0**target.mantissa_bits)


def _group_floors(golden: Tensor, inside: Tensor | None) -> Tensor:
    """Return ULP_FLOOR times the RMS of each group's valid finite values, `(groups, 1, 1)`, FP64.

    A group's own, unlike `_ulp_floor`: a head whose gradients are a hundred times smaller than
    those of the other heads is judged by its own ULPs.
    """
    g = golden.detach()
    squares = torch.linalg.vector_norm(g, dim=-1, dtype=torch.float64).square_()
    values = torch.full_like(squares, float(g.shape[-1]))
    if inside is not None:
        squares, values = squares.masked_fill(~inside, 0.0), values.masked_fill(~inside, 0.0)
    if not all_finite(squares):
        ok = torch.isfinite(g) if inside is None else torch.isfinite(g) & inside.unsqueeze(-1)
        squares = g.double().masked_fill(~ok, 0.0).square_().sum(-1)
        values = ok.sum(-1).double()
    rms = (squares.sum(-1) / values.sum(-1)).sqrt()
    # 0 / 0 where nothing counts
    return torch.where(torch.isfinite(rms), ULP_FLOOR * rms, 0.0)[:, None, None]


def golden_metrics(sums: GoldenSums) -> Tensor:
    """Return `GOLDEN_COLUMNS` of what `sums` are the sums of, in a new last axis."""
    n = sums.count
    candidate, baseline, norm = (t.sqrt() for t in (sums.candidate, sums.baseline, sums.golden))
    divisor = torch.maximum(baseline, sums.rounding.sqrt())
    both_exact = (candidate == 0) & (baseline == 0)
    metrics = torch.stack(
        [
            torch.where(both_exact, 1.0, candidate / divisor),
            relative_size(candidate, norm),
            relative_size(baseline, norm),
            relative_size(sums.candidate_product, sums.golden),
            relative_size(sums.baseline_product, sums.golden),
            sums.candidate_ulp / n,
            sums.baseline_ulp / n,
            baseline / sums.rounding.sqrt(),
        ],
        dim=-1,
    )
    metrics = torch.where((n > 0).unsqueeze(-1), metrics, torch.nan)
    return torch.cat([metrics, sums.nonfinite.unsqueeze(-1)], dim=-1)
