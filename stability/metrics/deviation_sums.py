"""What a deviation is made of: sums over each row, from which every metric follows.

One pass over x and the reference gives, for each row (the values of one position of one head), the
sums that `deviation` needs; figures of a head, of a range of positions and of the whole layer are
sums of rows. On the CPU the pass goes by chunks that stay in the cache, so its memory does not grow
with the tensors. Nothing here waits for the device or branches on a value. Leaves out the metrics.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named

__all__ = ["ULP_EDGES", "GoldenSums", "RowSums", "golden_sums", "row_sums"]

_POWERS = tuple(2.0**i for i in range(-1, 7))
ULP_EDGES = (*(-power for power in reversed(_POWERS)), *_POWERS)
"""Inner bounds of the histogram of errors in ULPs: -64 to -0.5 and 0.5 to 64, powers of two. The
first and last bin are open; an error on an edge counts to the bin further from zero."""

_SIDE = len(_POWERS)
_CHUNK = 2**15
"""Values a chunk on the CPU: some eight tensors of them in FP64 fit a core's second-level cache."""


class RowSums(NamedTuple):
    """Sums over the compared values of each row, FP64 in the shape of the rows; e = x - r."""

    count: Tensor
    nonfinite: Tensor
    largest: Tensor
    """max |e|"""
    absolute: Tensor
    """sum |e|"""
    error: Tensor
    """sum e"""
    square: Tensor
    """sum e^2"""
    reference: Tensor
    """sum r^2"""
    product: Tensor
    """sum r e"""
    ulp: Tensor
    """sum of e in ULPs"""
    ulp_square: Tensor
    ulp_largest: Tensor


class GoldenSums(NamedTuple):
    """Sums over each row's values that are finite in candidate, baseline and golden alike."""

    count: Tensor
    candidate: Tensor
    """sum (candidate - golden)^2"""
    baseline: Tensor
    golden: Tensor
    """sum golden^2"""


def row_sums(
    x: Tensor, reference: Tensor, format: str | Format, inside: Tensor | None
) -> tuple[RowSums, Tensor]:
    """Return the sums of each row, and how many errors lie between `ULP_EDGES`, in FP64.

    x and reference are `(..., head_dim)`; `inside`, bool `(...)`, is false for rows that are
    padding: their sums are 0 and their errors are not counted. Two equal infinities are left out.
    """
    target = format if isinstance(format, Format) else format_named(format)
    shape = x.shape[:-1]
    rows = [t.detach().reshape(-1, x.shape[-1]) for t in (x, reference)]
    keep = None if inside is None else inside.expand(shape).reshape(-1)
    sums = x.new_empty((len(RowSums._fields), rows[0].shape[0]), dtype=torch.float64)
    counts = x.new_zeros(len(ULP_EDGES) + 1, dtype=torch.float64)
    for part in _parts(rows[0]):
        kept = None if keep is None else keep[part].unsqueeze(1)
        counts += _sum_part(rows[0][part], rows[1][part], kept, target, sums[:, part])
    return RowSums(*(values.reshape(shape) for values in sums)), counts


def golden_sums(
    candidate: Tensor, baseline: Tensor, golden: Tensor, inside: Tensor | None
) -> GoldenSums:
    """Return the sums of each row; arguments as in `row_sums`."""
    shape = candidate.shape[:-1]
    tensors = (candidate, baseline, golden)
    rows = [t.detach().reshape(-1, candidate.shape[-1]) for t in tensors]
    keep = None if inside is None else inside.expand(shape).reshape(-1)
    sums = candidate.new_empty((len(GoldenSums._fields), rows[0].shape[0]), dtype=torch.float64)
    for part in _parts(rows[0]):
        c, b, g = (t[part].double() for t in rows)
        # new tensors: FP64 ones are not converted but the caller's own
        c, b, g = c - g, b - g, g.clone()
        ok = torch.isfinite(c) & torch.isfinite(b)
        if keep is not None:
            ok &= keep[part].unsqueeze(1)
        lost = ~ok
        for values in (c, b, g):
            values.masked_fill_(lost, 0.0)
        sums[0, part] = ok.sum(dim=1)
        for index, values in enumerate((c, b, g), start=1):
            sums[index, part] = torch.linalg.vector_norm(values, dim=1).square_()
    return GoldenSums(*(values.reshape(shape) for values in sums))


def _parts(rows: Tensor) -> list[slice]:
    """Return the rows of each chunk: a few on the CPU, all of them elsewhere."""
    step = max(1, _CHUNK // rows.shape[1]) if rows.device.type == "cpu" else rows.shape[0]
    return [slice(start, start + step) for start in range(0, rows.shape[0], max(1, step))]


def _sum_part(
    x: Tensor, reference: Tensor, keep: Tensor | None, target: Format, sums: Tensor
) -> Tensor:
    """Fill `sums`, a row of it for each field, and return the histogram."""
    norm = torch.linalg.vector_norm
    r = reference.double()
    error = x.double() - r
    ok = torch.isfinite(error)
    # counted apart from what is left out: two equal infinities are no deviation
    bad = ~ok & ~torch.isfinite(x) & (x != reference)
    if keep is not None:
        ok &= keep
        bad &= keep
    lost = ~ok
    error.masked_fill_(lost, 0.0)
    r = r.masked_fill(lost, 0.0)  # a copy: an FP64 reference is not converted but the caller's own
    ulps = (error * 2.0**target.mantissa_bits).mul_(_inverse_power(reference, target))
    ulps.masked_fill_(lost, 0.0)
    sums[0] = ok.sum(dim=1)
    sums[1] = bad.sum(dim=1)
    sums[2] = norm(error, torch.inf, dim=1)
    sums[3] = norm(error, 1, dim=1)
    sums[4] = error.sum(dim=1)
    sums[5] = norm(error, dim=1).square_()
    sums[6] = norm(r, dim=1).square_()
    sums[7] = r.mul_(error).sum(dim=1)
    sums[8] = ulps.sum(dim=1)
    sums[9] = norm(ulps, dim=1).square_()
    sums[10] = norm(ulps, torch.inf, dim=1)
    return _histogram(ulps, ok)


def _inverse_power(reference: Tensor, target: Format) -> Tensor:
    """Return 2^-e, FP64, where 2^e is the power of two below |reference|, as in `ulp.ulp_size`."""
    if reference.dtype == torch.float64:
        bits, mantissa, bias, mask = reference.view(torch.int64), 52, _BIAS, 0x7FF
    else:
        bits, mantissa, bias, mask = reference.float().view(torch.int32), 23, 127, 0xFF
    exponent = ((bits >> mantissa) & mask).long().sub_(bias)
    # 2^-1023 would be subnormal: values of FP64's last binade count as those below
    highest = min(1 - target.min_exponent, _BIAS - 1)
    exponent.clamp_(min=target.min_exponent, max=highest)
    return exponent.neg_().add_(_BIAS).bitwise_left_shift_(52).view(torch.float64)


_BIAS = 1023
"""Of FP64's exponent."""


def _histogram(ulps: Tensor, ok: Tensor) -> Tensor:
    """Return how many of `ulps` lie in each bin; those not `ok` in none."""
    bits = ulps.float().view(torch.int32)
    distance = ((bits >> 23) & 0xFF).sub_(127 - 2).clamp_(0, _SIDE)
    bins = torch.where(bits < 0, _SIDE - distance, _SIDE + distance)
    bins.masked_fill_(~ok, 2 * _SIDE + 1)
    size = 2 * _SIDE + 2
    if ulps.device.type != "cpu":  # bincount would wait for the device there
        ones = torch.ones(1, dtype=torch.float64, device=ulps.device).expand(bins.numel())
        counts = ulps.new_zeros(size).scatter_add_(0, bins.flatten().long(), ones)
    else:
        counts = torch.bincount(bins.flatten(), minlength=size).double()
    return counts[:-1]
