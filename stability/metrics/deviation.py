"""Deviation: how far an attention's result x is from a reference r on the same inputs.

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

from itertools import pairwise
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from attention_kernels.choices import input_format
from attention_kernels.formats import Format
from stability.metrics.deviation_sums import (
    ULP_EDGES,
    ErrorSums,
    GoldenSums,
    error_sums,
    golden_sums,
)

__all__ = [
    "DEVIATION_METRICS",
    "GOLDEN_METRICS",
    "PART_METRICS",
    "ULP_EDGES",
    "Comparison",
    "compare",
    "deviation",
    "deviation_tensor",
    "golden_tensor",
    "position_ranges",
]

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
