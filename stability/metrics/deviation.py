"""What a deviation is made of: sums over the values of each head and range of positions.

One pass over x and the reference gives the sums that `deviation` needs of every head and range;
those of a head, of a range and of the whole layer are sums of these. A pass over the reference
before it finds the size at which ULPs stop to shrink (`ULP_FLOOR`). On the CPU a pass goes by
chunks that stay in the cache, so its memory does not grow with the tensors. Nothing here waits for
the device; only on the CPU does a branch look at a value. Leaves out the metrics themselves.

Deviation: how far an attention's result x is from a reference r on the same inputs.

Everything is accumulated in FP64 on the tensors' device and stays there as one small tensor, so
that a probe can gather all layers and transfer once; nothing here waits for the device or branches
on a value. Only positions where both x and r are finite are compared: one NaN must not blank every
other figure, and shows in `nonfinite`. Leaves out the pass over the tensors (`deviation_sums`),
ULPs (`ulp`) and names (`records.names`).

`bias` and `bias_ulp` are signed because the failure in arXiv 2510.04212 is a bias of a fifth of an
ULP that no absolute measure shows; `error_ratio` is the acceptance measure of flash-attn's tests.
ULPs are those at the reference, but not below a sixteenth of its RMS (`ULP_FLOOR`): next to a zero
by cancellation any error would be 1e20 of its ULPs, and no bias could be seen beside it.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attention_kernels.choices import input_format
from attention_kernels.formats import Format, format_named

__all__ = [
    "DEVIATION_METRICS",
    "GOLDEN_METRICS",
    "PART_METRICS",
    "ULP_EDGES",
    "ULP_FLOOR",
    "Comparison",
    "ErrorSums",
    "GoldenSums",
    "compare",
    "deviation",
    "deviation_tensor",
    "error_sums",
    "golden_sums",
    "golden_tensor",
    "position_ranges",
]

_POWERS = tuple(2.0**i for i in range(-1, 7))
ULP_EDGES = (*(-power for power in reversed(_POWERS)), *_POWERS)
"""Inner bounds of the histogram of errors in ULPs: -64 to -0.5 and 0.5 to 64, powers of two. The
first and last bin are open; an error on an edge counts to the bin further from zero."""

ULP_FLOOR = 2.0**-4
"""In units of the reference's RMS: smaller values have the ULP of this size.

An error is measured in ULPs at max(|r|, ULP_FLOOR * RMS), the RMS over all valid finite r of the
layer: one floor for all its heads and ranges, and for all that is held against that reference.
Where r is next to zero by cancellation, as dq of the first position under a causal mask, the terms
it is the sum of are not, nor are their rounding errors: at r itself a harmless one is 1e23 ULPs,
and a mean over values tells of nothing else. LAPACK's test ratios go further, to units of roundoff
at the norm of the whole result; a floor under the ULPs of single values is ours. Of normally
distributed r, 5 % lie below it; a head a hundred times smaller than the others lies there whole.
"""

_CHUNK = 2**17
"""Values a chunk on the CPU, 1 MiB in FP64: smaller ones cost more calls, larger ones the cache."""


class ErrorSums(NamedTuple):
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


class GoldenSums(NamedTuple):
    """Sums over the values that are finite in candidate, baseline and golden alike."""

    count: Tensor
    candidate: Tensor
    """sum (candidate - golden)^2"""
    baseline: Tensor
    golden: Tensor
    """sum golden^2"""


def error_sums(
    x: Tensor,
    reference: Tensor,
    format: str | Format,
    inside: Tensor | None = None,
    ranges: Sequence[range] | None = None,
) -> tuple[ErrorSums, Tensor]:
    """Return the sums of each head's ranges, `(groups, ranges)`, and the histogram of errors.

    x and reference are `(groups, length, head_dim)`: a group is one head of one sequence; `ranges`
    part the length, by default it is one. `inside`, bool `(groups, length)`, is false for rows
    that are padding: they count nowhere. Two equal infinities are left out. The histogram, FP64,
    says how many errors lie between `ULP_EDGES`. ULPs are those of `ULP_FLOOR`.
    """
    target = format if isinstance(format, Format) else format_named(format)
    ranges = ranges or [range(x.shape[1])]
    floor = _floor(reference, inside)
    bins = x.new_zeros(_BINS, dtype=torch.float64)
    table = _empty(len(ErrorSums._fields), x, len(ranges))
    for groups, rows, at in _parts(x, ranges):
        keep = None if inside is None else inside[groups, rows].unsqueeze(-1)
        here = (groups, rows)
        pair = (x[here].detach(), reference[here].detach())
        sums, counts = _sum_errors(*pair, keep, target, floor)
        bins += counts
        for index, values in enumerate(sums):
            into = table[index, groups, at]
            is_largest = ErrorSums._fields[index] in ("largest", "ulp_largest")
            into.copy_(torch.maximum(into, values) if is_largest else into + values)
    return ErrorSums(*table), _folded(bins)


def golden_sums(
    candidate: Tensor,
    baseline: Tensor,
    golden: Tensor,
    inside: Tensor | None = None,
    ranges: Sequence[range] | None = None,
) -> GoldenSums:
    """Return the sums of each head's ranges; arguments as in `error_sums`."""
    ranges = ranges or [range(candidate.shape[1])]
    table = _empty(len(GoldenSums._fields), candidate, len(ranges))
    for groups, rows, at in _parts(candidate, ranges):
        keep = None if inside is None else inside[groups, rows].unsqueeze(-1)
        g = golden[groups, rows].detach().double()
        c, b = (torch.sub(t[groups, rows].detach(), g) for t in (candidate, baseline))
        values = torch.stack([_squared(c), _squared(b), _squared(g)])
        count = c.new_full((c.shape[0],), float(c[0].numel()))
        if keep is not None or not _all_finite(values):
            ok = torch.isfinite(c) & torch.isfinite(b)
            ok = ok if keep is None else ok & keep
            values = torch.stack([_squared(t.masked_fill(~ok, 0.0)) for t in (c, b, g)])
            count = ok.sum(dim=(1, 2)).double()
        table[0, groups, at] += count
        table[1:, groups, at] += values
    return GoldenSums(*table)


def _empty(fields: int, x: Tensor, ranges: int) -> Tensor:
    return x.new_zeros((fields, x.shape[0], ranges), dtype=torch.float64)


def _parts(x: Tensor, ranges: Sequence[range]) -> list[tuple[slice, slice, int]]:
    """Return (groups, rows, index of their range) of each chunk: small on the CPU, whole else."""
    groups, _, head_dim = x.shape
    limit = _CHUNK if x.device.type == "cpu" else max(1, x.numel())
    found = []
    for index, positions in enumerate(ranges):
        step = max(1, min(len(positions), limit // head_dim))
        together = max(1, limit // (step * head_dim))
        for start in range(positions.start, positions.stop, step):
            rows = slice(start, min(start + step, positions.stop))
            found += [
                (slice(first, first + together), rows, index)
                for first in range(0, groups, together)
            ]
    return found


def _floor(reference: Tensor, inside: Tensor | None) -> Tensor:
    """Return ULP_FLOOR times the RMS of the valid finite values, FP64; 0 if it has none."""
    square, count = reference.new_zeros((2,), dtype=torch.float64)
    for groups, rows, _ in _parts(reference, [range(reference.shape[1])]):
        r = reference[groups, rows].detach().double()
        keep = None if inside is None else inside[groups, rows]
        if keep is None:  # 2.6 times as fast as by rows
            squares, compared = torch.dot(r.flatten(), r.flatten()), r.numel()
        else:  # of each row: padding is left out without a pass over its values
            squares = torch.linalg.vector_norm(r, dim=-1).square_().masked_fill_(~keep, 0.0)
            compared = keep.sum() * r.shape[-1]
        if not _all_finite(squares):
            ok = torch.isfinite(r) if keep is None else torch.isfinite(r) & keep.unsqueeze(-1)
            squares, compared = _squared(r.masked_fill(~ok, 0.0)), ok.sum()
        square += squares.sum()
        count += compared
    rms = (square / count).sqrt()
    return torch.where(torch.isfinite(rms), ULP_FLOOR * rms, 0.0)


def _sum_errors(
    x: Tensor, reference: Tensor, keep: Tensor | None, target: Format, floor: Tensor
) -> tuple[list[Tensor], Tensor]:
    """Return the fields of `ErrorSums` of each group, and the histogram by sign and exponent."""
    r = reference.double()  # an FP64 reference is not converted: it is the caller's own
    error = torch.sub(x, r)
    size = error.abs()
    absolute = size.sum(dim=(1, 2))
    count = absolute.new_full(absolute.shape, float(size[0].numel()))
    nonfinite, ok = torch.zeros_like(count), None
    if keep is not None or not _all_finite(absolute):
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
    sums += [error.sum(dim=(1, 2)), _squared(error), _squared(r)]
    sums.append(torch.mul(r, error, out=size).sum(dim=(1, 2)))
    ulps = error.mul_(_inverse_power(reference, floor, target)).mul_(2.0**target.mantissa_bits)
    if ok is not None:
        ulps.masked_fill_(~ok, 0.0)
    sums += [ulps.sum(dim=(1, 2)), _squared(ulps)]
    sums.append(torch.abs(ulps, out=size).amax(dim=(1, 2)))
    return sums, _histogram(ulps, ok)


def _all_finite(sums: Tensor) -> bool:
    """Say whether no value was infinite or NaN; false where saying so would wait for a device."""
    return sums.device.type == "cpu" and bool(torch.isfinite(sums).all())


def _squared(x: Tensor) -> Tensor:
    """Return the sum of squares of each group."""
    return torch.linalg.vector_norm(x, dim=(1, 2)).square_()


def _inverse_power(reference: Tensor, floor: Tensor, target: Format) -> Tensor:
    """Return 2^-e, where 2^e is the power of two below max(|reference|, floor), as in `ulp_size`.

    The bits of FP32, or of FP64 for an FP64 reference. 2^-e of their last binade would be
    subnormal: its values count as those of the one below.
    """
    wide = reference if reference.dtype == torch.float64 else reference.float()
    integer, exponent_of_one, mantissa = (
        (torch.int64, 1023, 52) if wide.dtype == torch.float64 else (torch.int32, 127, 23)
    )
    lowest = max(target.min_exponent, 1 - exponent_of_one) + exponent_of_one
    highest = min(1 - target.min_exponent, exponent_of_one - 1) + exponent_of_one
    mask = (2 * exponent_of_one + 1) << mantissa
    power = wide.view(integer) & mask
    power.clamp_(min=floor.to(wide.dtype).view(integer) & mask)
    power.clamp_(min=lowest << mantissa, max=highest << mantissa)
    return power.neg_().add_((2 * exponent_of_one) << mantissa).view(wide.dtype)


_BINS = 512
"""One for each sign and exponent of FP32, until they are folded into those of `ULP_EDGES`."""


def _histogram(ulps: Tensor, ok: Tensor | None) -> Tensor:
    """Return how many values of each sign and exponent there are, FP64; those not `ok` nowhere."""
    bins = (ulps.float().view(torch.int32) >> 23).bitwise_and_(_BINS - 1)
    if ok is not None:
        bins = bins.masked_fill_(~ok, _BINS)
    if ulps.device.type == "cpu":
        return torch.bincount(bins.flatten(), minlength=_BINS)[:_BINS].double()
    # bincount would wait for the device
    ones = torch.ones(1, dtype=torch.float64, device=ulps.device).expand(bins.numel())
    counts = torch.zeros(_BINS + 1, dtype=torch.float64, device=ulps.device)
    return counts.scatter_add_(0, bins.flatten().long(), ones)[:_BINS]


def _folded(bins: Tensor) -> Tensor:
    """Return the counts between `ULP_EDGES` of those by sign and exponent."""
    side = len(_POWERS)
    # exponent fields at which a bin begins: 0.5 has 126
    starts = [0, *range(126, 126 + side), 256]
    positive = [bins[a:b].sum() for a, b in pairwise(starts)]
    negative = [bins[256 + a : 256 + b].sum() for a, b in pairwise(starts)]
    middle = positive[0] + negative[0]
    return torch.stack([*reversed(negative[1:]), middle, *positive[1:]])


DEVIATION_METRICS = (
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
GOLDEN_METRICS = ("error_ratio", "golden_candidate_rel_fro", "golden_baseline_rel_fro")
PART_METRICS = ("rel_fro", "rmse", "max_abs", "bias", "bias_ulp", "bias_ulp_se", "nonfinite")
"""Those that are given for a single head or range of positions."""

_PART_COLUMNS = tuple(DEVIATION_METRICS.index(metric) for metric in PART_METRICS)


class Comparison(NamedTuple):
    """The figures of one pair of results, FP64 on their device."""

    layer: Tensor
    """`DEVIATION_METRICS`, and with a golden `GOLDEN_METRICS`."""
    heads: Tensor | None
    """`(heads, PART_METRICS)`, and with a golden `error_ratio`."""
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
) -> Comparison:
    """Return the metrics of x against the reference, and of both against the golden. No sync.

    Arguments and metrics as in `deviation_tensor` and `golden_tensor`. With `heads` also for each
    head, with `positions` for each of so many ranges of positions (`position_ranges`); both need
    `(batch, heads, length, head_dim)`. ValueError as `deviation_tensor`, or for another rank.
    """
    tensors = {"x": x, "reference": reference}
    _check("compare", tensors if golden is None else {**tensors, "golden": golden})
    if (heads or positions) and x.dim() != 4:
        raise ValueError(
            "compare: x must be (batch, heads, length, head_dim) for figures of heads or "
            f"positions, got {tuple(x.shape)}"
        )
    ranges = position_ranges(x.shape[-2], positions) if positions else None
    inside = _inside(x, valid)
    format = output_format or input_format(x.dtype)
    sums, histogram = error_sums(_grouped(x), _grouped(reference), format, inside, ranges)
    against = None
    if golden is not None:
        results = (_grouped(x), _grouped(reference), _grouped(golden))
        against = golden_sums(*results, inside=inside, ranges=ranges)
    layer = _metrics(_total(sums))
    if against is not None:
        layer = torch.cat([layer, _golden_metrics(_total(against))])
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


def deviation_tensor(
    x: Tensor,
    reference: Tensor,
    *,
    output_format: str | Format | None = None,
    valid: Tensor | None = None,
) -> Tensor:
    """Return the metrics of `DEVIATION_METRICS`, in that order, as FP64 on x's device. No sync.

    x and reference are floating-point of one shape `(..., head_dim)`; `valid` is bool and
    broadcasts to `(...)`: false positions (padding) are left out of everything. ULPs are those of
    `output_format`, by default x's own format, at max(|r|, RMS of r / 16), the RMS over the valid
    finite values of r, of all heads and positions; at the smallest subnormal if that is 0.

    With e = x - r over the n compared values: `std` that of e, `rmse` = sqrt(mean e^2), `rel_fro` =
    |e| / |r|, `sqnr_db` = 20 log10(|r| / |e|), `bias_ulp` the mean and `ulp_max` the largest of e
    in ULPs, `bias_ulp_se` = std(e in ULPs) / sqrt(n), which takes errors as independent.
    `nonfinite` counts values of x. Equal values, all zero or not, have rel_fro 0, cosine 1 and an
    infinite sqnr_db; a cosine with a zero vector is else NaN. With nothing to compare all but
    `nonfinite` are NaN. ValueError for unequal or empty shapes, a dtype that is no format, an
    unknown format, or a mask that does not fit.
    """
    _check("deviation_tensor", {"x": x, "reference": reference})
    format = output_format or input_format(x.dtype)
    sums, _ = error_sums(_grouped(x), _grouped(reference), format, _inside(x, valid))
    return _metrics(_total(sums))


def deviation(
    x: Tensor,
    reference: Tensor,
    *,
    output_format: str | Format | None = None,
    valid: Tensor | None = None,
) -> dict[str, float]:
    """Return the metrics of `deviation_tensor` by name, on the host."""
    values = deviation_tensor(x, reference, output_format=output_format, valid=valid).tolist()
    return dict(zip(DEVIATION_METRICS, values, strict=True))


def golden_tensor(candidate: Tensor, baseline: Tensor, golden: Tensor) -> Tensor:
    """Return the metrics of `GOLDEN_METRICS`, in that order, as FP64 on the device. No sync.

    `error_ratio` = |candidate - golden| / |baseline - golden|, 1 where both are exact; the other
    two are each one's error relative to |golden|. Positions where all three are finite count.
    ValueError for unequal or empty shapes.
    """
    _check("golden_tensor", {"candidate": candidate, "baseline": baseline, "golden": golden})
    sums = golden_sums(_grouped(candidate), _grouped(baseline), _grouped(golden))
    return _golden_metrics(_total(sums))


S = TypeVar("S", ErrorSums, GoldenSums)


def _grouped(x: Tensor) -> Tensor:
    """Return x as `(groups, length, head_dim)`, a view where its strides allow it."""
    if x.dim() < 3:
        return x.reshape(1, -1, x.shape[-1])
    return x.reshape(-1, *x.shape[-2:])


def _unflattened(sums: S, x: Tensor) -> S:
    """Return sums of `(batch * heads, ranges)` as `(batch, heads, ranges)`."""
    return type(sums)(*(values.unflatten(0, x.shape[:2]) for values in sums))


def _total(sums: S, over: tuple[int, ...] = (0, 1)) -> S:
    """Return what the sums over some dimensions are: the largest of the largest, sums of sums."""
    return type(sums)(
        *(
            values.amax(dim=over) if name.endswith("largest") else values.sum(dim=over)
            for name, values in sums._asdict().items()
        )
    )


def _part_metrics(sums: ErrorSums, against: GoldenSums | None, over: tuple[int, ...]) -> Tensor:
    """Return `PART_METRICS`, and `error_ratio`, of sums taken together over some dimensions."""
    made = _metrics(_total(sums, over))[..., _PART_COLUMNS]
    if against is None:
        return made
    return torch.cat([made, _golden_metrics(_total(against, over))[..., :1]], dim=-1)


def _metrics(sums: ErrorSums) -> Tensor:
    """Return `DEVIATION_METRICS` of what `sums` are the sums of, in a new last axis."""
    n = sums.count
    bias, bias_ulp = sums.error / n, sums.ulp / n
    mean_square, mean_square_ulp = sums.square / n, sums.ulp_square / n
    norm, error_norm = sums.reference.sqrt(), sums.square.sqrt()
    # |x|^2 and x r by way of r: e is what was summed
    x_norm = (sums.reference + 2 * sums.product + sums.square).clamp(min=0.0).sqrt()
    cosine = ((sums.reference + sums.product) / (x_norm * norm)).clamp(-1.0, 1.0)
    equal = sums.largest == 0
    compared = torch.stack(
        [
            sums.largest,
            sums.absolute / n,
            _std(mean_square, bias),
            mean_square.sqrt(),
            _ratio(error_norm, norm),
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


def _golden_metrics(sums: GoldenSums) -> Tensor:
    """Return `GOLDEN_METRICS` of what `sums` are the sums of, in a new last axis."""
    candidate, baseline, norm = (t.sqrt() for t in (sums.candidate, sums.baseline, sums.golden))
    ratio = torch.where(candidate == baseline, 1.0, candidate / baseline)
    metrics = torch.stack([ratio, _ratio(candidate, norm), _ratio(baseline, norm)], dim=-1)
    return torch.where((sums.count > 0).unsqueeze(-1), metrics, torch.nan)


def _check(function: str, tensors: dict[str, Tensor]) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(set(shapes)) > 1 or 0 in shapes[0]:
        raise ValueError(
            f"{function}: {', '.join(tensors)} must have one shape and hold values, got "
            f"{', '.join(map(str, shapes))}; compare results on the same inputs"
        )


def _inside(x: Tensor, valid: Tensor | None) -> Tensor | None:
    """Return which rows are no padding, grouped as in `_grouped`; None if all are."""
    if valid is None:
        return None
    try:
        if valid.dtype == torch.bool:
            rows = valid.expand(x.shape[:-1])
            return rows.reshape(1, -1) if x.dim() < 3 else rows.reshape(-1, x.shape[-2])
    except RuntimeError:
        pass  # does not broadcast
    raise ValueError(
        f"deviation_tensor: valid must be bool and broadcast to {tuple(x.shape[:-1])}, got "
        f"{valid.dtype} {tuple(valid.shape)}; give one flag for each position"
    )


def _std(mean_square: Tensor, mean: Tensor) -> Tensor:
    # rounding of the difference is below 1e-8 of the mean, and the mean is shown beside it
    return (mean_square - mean.square()).clamp(min=0.0).sqrt()


def _ratio(error: Tensor, norm: Tensor) -> Tensor:
    """Return error / norm; no error at all is 0 also when the reference is zero."""
    return torch.where(error == 0, 0.0, error / norm)
