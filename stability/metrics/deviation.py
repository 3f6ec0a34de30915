"""Deviation: how far an attention's result x is from a reference r on the same inputs.

What is measured. With e = x - r, unsigned measures (largest, mean, RMS, relative norm) say how
large the error is, signed ones say whether it leans to one side. `bias` and `bias_ulp` are signed
because the failure in arXiv 2510.04212 is a bias of a fifth of an ULP that no absolute measure
shows. Where a golden is given its measures come along (`golden_error`): they say whose error it is.

How it is summed. Every sum is FP64: a mean of signed errors keeps what is far below one of them.
One pass over x and r sums each head's ranges of positions; a head, a range and the layer are sums
of those. A pass over r before it finds the size below which ULPs no longer shrink (`ULP_FLOOR`).
Only values that are finite in both count, because one NaN must not blank every other measure; it
shows in `nonfinite`. The metrics of a layer stay on the tensors' device as one small tensor, so a
probe gathers all layers and transfers once. Nothing waits for the device; only on the CPU, where
looking is free, does a branch depend on a value.

Leaves out the spacing of formats (`ulp`), layout and chunks (`result_sums`), and how metrics are
named in a record (`records`).
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named, input_format
from stability.metrics.golden_error import (
    GOLDEN_COLUMNS,
    PART_GOLDEN_COLUMNS,
    GoldenSums,
    golden_metrics,
    golden_sums,
)
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
from stability.metrics.ulp import EXPONENT_BINS, count_by_exponent, merge_into_edges, to_ulps_

__all__ = [
    "LAYER_COLUMNS",
    "PART_COLUMNS",
    "Comparison",
    "compare",
    "deviation",
    "position_ranges",
]

LAYER_COLUMNS = (
    "max_abs",
    "mean_abs",
    "std",
    "rmse",
    "rel_fro",
    "cosine",
    "sqnr_db",
    "bias",
    "bias_ulp",
    "bias_ulp_se",
    "ulp_max",
    "nonfinite",
)
"""The columns of `Comparison.layer`."""
PART_COLUMNS = ("rel_fro", "rmse", "max_abs", "bias", "bias_ulp", "bias_ulp_se", "nonfinite")
"""The columns for a single head or range of positions."""

_PART_GOLDEN_INDICES = tuple(GOLDEN_COLUMNS.index(metric) for metric in PART_GOLDEN_COLUMNS)
_PART_INDICES = tuple(LAYER_COLUMNS.index(metric) for metric in PART_COLUMNS)


class Comparison(NamedTuple):
    """The metrics of one pair of results, FP64 on their device."""

    layer: Tensor
    """`LAYER_COLUMNS`, and with a golden `GOLDEN_COLUMNS`."""
    heads: Tensor | None
    """`(heads, PART_COLUMNS)`, and with a golden `PART_GOLDEN_COLUMNS`."""
    positions: Tensor | None
    """The same for each range of positions."""
    histogram: Tensor
    """How many errors lie between `ULP_EDGES`."""


def compare(
    x: Tensor,
    reference: Tensor,
    *,
    golden: Tensor | None = None,
    output_format: str | Format | None = None,
    valid: Tensor | None = None,
    heads: bool = False,
    positions: int = 0,
    golden_ulp: float = 0.0,
) -> Comparison:
    """Return the metrics of x against the reference, and of both against the golden.

    The tensors are floating-point of one shape `(..., head_dim)`. `valid` is bool and broadcasts to
    `(...)`: false positions are padding and count nowhere. ULPs are those of `output_format`, by
    default x's own format, not below `ULP_FLOOR`; at the smallest subnormal if that is 0. With
    `heads` there are also metrics of each head, with `positions` of each of so many ranges of
    positions (`position_ranges`); both need `(batch, heads, length, head_dim)`.

    With e = x - r over the n compared values: `std` that of e, `rmse` = sqrt(mean e^2), `rel_fro` =
    |e| / |r|, `sqnr_db` = 20 log10(|r| / |e|), `bias_ulp` the mean and `ulp_max` the largest of e
    in ULPs, `bias_ulp_se` = std(e in ULPs) / sqrt(n), which takes errors as independent.
    `nonfinite` counts values of x. Equal values, all zero or not, have rel_fro 0, cosine 1 and an
    infinite sqnr_db; a cosine with a zero vector is else NaN. With nothing to compare all but
    `nonfinite` are NaN. The measures against the golden are those of `golden_tensor`; with
    `golden_ulp` they take it for the ULP of every value. That is meant for an LSE, whose absolute
    error is a relative one of each probability: an FP32 LSE need be no finer than P is rounded.

    ValueError for unequal or empty shapes, another rank than heads or positions need, a dtype that
    is no format, an unknown format, or a mask that does not fit.
    """
    tensors = {"x": x, "reference": reference}
    check_shapes("compare", tensors if golden is None else {**tensors, "golden": golden})
    if (heads or positions) and x.dim() != 4:
        raise ValueError(
            "compare: x must be (batch, heads, length, head_dim) for figures of heads or "
            f"positions, got {tuple(x.shape)}"
        )
    ranges = position_ranges(x.shape[-2], positions) if positions else None
    inside = rows_inside(x, valid)
    format = output_format or input_format(x.dtype)
    sums, histogram = _error_sums(grouped(x), grouped(reference), format, inside, ranges)
    layer, against = _metrics(_total(sums)), None
    if golden is not None:
        results = (grouped(x), grouped(reference), grouped(golden))
        against = golden_sums(*results, inside=inside, ranges=ranges, ulp=golden_ulp)
        layer = torch.cat([layer, golden_metrics(_total(against))])
    if not (heads or positions):
        return Comparison(layer, None, None, histogram)
    sums = _unflattened(sums, x)
    against = None if against is None else _unflattened(against, x)
    return Comparison(
        layer=layer,
        heads=_part_metrics(sums, against, (0, 2)) if heads else None,
        positions=_part_metrics(sums, against, (0, 1)) if positions else None,
        histogram=histogram,
    )


def position_ranges(length: int, ranges: int) -> list[range]:
    """Return so many ranges of about equal size that make up `length` positions, none empty."""
    edges = [round(i * length / ranges) for i in range(ranges + 1)]
    return [range(a, b) for a, b in pairwise(edges) if a < b]


def deviation(
    x: Tensor,
    reference: Tensor,
    *,
    output_format: str | Format | None = None,
    valid: Tensor | None = None,
) -> dict[str, float]:
    """Return `LAYER_COLUMNS` by name, on the host; arguments and errors as in `compare`."""
    found = compare(x, reference, output_format=output_format, valid=valid)
    return dict(zip(LAYER_COLUMNS, found.layer.tolist(), strict=True))


class _ErrorSums(NamedTuple):
    """Sums over the compared values, FP64, of one shape; e = x - r."""

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


_LARGEST = ("largest", "ulp_largest")
"""The fields that hold a maximum; two of them make their maximum, two sums make their sum."""


def _error_sums(
    x: Tensor,
    reference: Tensor,
    format: str | Format,
    inside: Tensor | None = None,
    ranges: Sequence[range] | None = None,
) -> tuple[_ErrorSums, Tensor]:
    """Return the sums of each group's ranges, `(groups, ranges)`, and the histogram of errors.

    x and reference are `(groups, length, head_dim)`: a group is one head of one sequence. `ranges`
    part the length; by default it is one range. `inside`, bool `(groups, length)`, is false for
    rows of padding.
    """
    target = format if isinstance(format, Format) else format_named(format)
    ranges = ranges or [range(x.shape[1])]
    floor = _ulp_floor(reference, inside)
    histogram = x.new_zeros(EXPONENT_BINS, dtype=torch.float64)
    totals = _ErrorSums(*zero_sums(len(_ErrorSums._fields), x, ranges))
    for groups, rows, at in chunks(x, ranges):
        keep = None if inside is None else inside[groups, rows].unsqueeze(-1)
        pair = (x[groups, rows].detach(), reference[groups, rows].detach())
        sums, counts = _sum_errors(*pair, keep, target, floor)
        histogram += counts
        for name, total, values in zip(_ErrorSums._fields, totals, sums, strict=True):
            into = total[groups, at]
            into.copy_(torch.maximum(into, values) if name in _LARGEST else into + values)
    return totals, merge_into_edges(histogram)


S = TypeVar("S", _ErrorSums, GoldenSums)


def _ulp_floor(reference: Tensor, inside: Tensor | None) -> Tensor:
    """Return ULP_FLOOR times the RMS of the valid finite values, FP64; 0 if it has none."""
    square, count = reference.new_zeros((2,), dtype=torch.float64)
    for groups, rows, _ in chunks(reference, [range(reference.shape[1])]):
        r = reference[groups, rows].detach().double()
        keep = None if inside is None else inside[groups, rows]
        if keep is None:  # 2.6 times as fast as by rows
            squares, compared = torch.dot(r.flatten(), r.flatten()), r.numel()
        else:  # of each row: padding is left out without a pass over its values
            squares = torch.linalg.vector_norm(r, dim=-1).square_().masked_fill_(~keep, 0.0)
            compared = keep.sum() * r.shape[-1]
        if not all_finite(squares):
            ok = torch.isfinite(r) if keep is None else torch.isfinite(r) & keep.unsqueeze(-1)
            squares, compared = squared_norms(r.masked_fill(~ok, 0.0)), ok.sum()
        square += squares.sum()
        count += compared
    rms = (square / count).sqrt()
    # 0 / 0 where nothing counts
    return torch.where(torch.isfinite(rms), ULP_FLOOR * rms, 0.0)


def _sum_errors(
    x: Tensor, reference: Tensor, keep: Tensor | None, target: Format, floor: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the fields of `_ErrorSums` of each group, and the histogram by sign and exponent."""
    r = reference.double()  # an FP64 reference is not converted: it is the caller's own
    error = torch.sub(x, r)
    size = error.abs()
    absolute = size.sum(dim=(1, 2))
    count = absolute.new_full(absolute.shape, float(size[0].numel()))
    nonfinite, ok = torch.zeros_like(count), None
    if keep is not None or not all_finite(absolute):
        ok = torch.isfinite(error)
        # counted apart from what is left out: two equal infinities are no deviation
        bad = ~ok & ~torch.isfinite(x) & (x != reference)
        if keep is not None:
            ok, bad = ok & keep, bad & keep
        r = r.masked_fill(~ok, 0.0)
        for values in (error, size):
            values.masked_fill_(~ok, 0.0)
        absolute, count = size.sum(dim=(1, 2)), ok.sum(dim=(1, 2)).double()
        nonfinite = bad.sum(dim=(1, 2)).double()
    sums = [count, nonfinite, size.amax(dim=(1, 2)), absolute]
    sums += [error.sum(dim=(1, 2)), squared_norms(error), squared_norms(r)]
    # into `size`, which is summed already: one tensor less in the cache
    sums.append(torch.mul(r, error, out=size).sum(dim=(1, 2)))
    # last, because it overwrites `error`; the reference goes in as it is, not widened
    ulps = to_ulps_(error, reference, floor, target)
    if ok is not None:
        ulps.masked_fill_(~ok, 0.0)
    sums += [ulps.sum(dim=(1, 2)), squared_norms(ulps)]
    sums.append(torch.abs(ulps, out=size).amax(dim=(1, 2)))
    return sums, count_by_exponent(ulps, ok)


def _unflattened(sums: S, x: Tensor) -> S:
    """Return sums of `(batch * heads, ranges)` as `(batch, heads, ranges)`."""
    return type(sums)(*(values.unflatten(0, x.shape[:2]) for values in sums))


def _total(sums: S, over: tuple[int, ...] = (0, 1)) -> S:
    """Return the sums taken together over some dimensions."""
    return type(sums)(
        *(
            values.amax(dim=over) if name in _LARGEST else values.sum(dim=over)
            for name, values in sums._asdict().items()
        )
    )


def _part_metrics(sums: _ErrorSums, against: GoldenSums | None, over: tuple[int, ...]) -> Tensor:
    """Return the columns of parts, of sums taken together over some dimensions."""
    made = _metrics(_total(sums, over))[..., _PART_INDICES]
    if against is None:
        return made
    golden = golden_metrics(_total(against, over))[..., _PART_GOLDEN_INDICES]
    return torch.cat([made, golden], dim=-1)


def _metrics(sums: _ErrorSums) -> Tensor:
    """Return `LAYER_COLUMNS` of what `sums` are the sums of, in a new last axis."""
    n = sums.count
    bias, bias_ulp = sums.error / n, sums.ulp / n
    mean_square, mean_square_ulp = sums.square / n, sums.ulp_square / n
    norm, error_norm = sums.reference.sqrt(), sums.square.sqrt()
    # |x|^2 and x r by way of r: e is what was summed
    # where x is next to zero, rounding can take |x|^2 below 0, and the cosine beyond 1
    x_norm = (sums.reference + 2 * sums.product + sums.square).clamp(min=0.0).sqrt()
    cosine = ((sums.reference + sums.product) / (x_norm * norm)).clamp(-1.0, 1.0)
    equal = sums.largest == 0
    compared = torch.stack(
        [
            sums.largest,
            sums.absolute / n,
            _std(mean_square, bias),
            mean_square.sqrt(),
            relative_size(error_norm, norm),
            torch.where(equal, 1.0, cosine),
            torch.where(equal, torch.inf, 20 * torch.log10(norm / error_norm)),
            bias,
            bias_ulp,
            _std(mean_square_ulp, bias_ulp) / n.sqrt(),
            sums.ulp_largest,
        ],
        dim=-1,
    )
    compared = torch.where((n > 0).unsqueeze(-1), compared, torch.nan)
    return torch.cat([compared, sums.nonfinite.unsqueeze(-1)], dim=-1)


def _std(mean_square: Tensor, mean: Tensor) -> Tensor:
    # rounding of the difference is below 1e-8 of the mean, and the mean is shown beside it
    return (mean_square - mean.square()).clamp(min=0.0).sqrt()
