"""Deviation: how far an attention's result x is from a reference r on the same inputs.

Everything is accumulated in FP64 on the tensors' device and stays there as one small tensor, so
that a probe can gather all layers and transfer once; nothing here waits for the device or branches
on a value. Only positions where both x and r are finite are compared: one NaN must not blank every
other figure, and shows in `nonfinite`. Leaves out ULPs (`ulp`) and names (`records.names`).

`bias` and `bias_ulp` are signed because the failure in arXiv 2510.04212 is a bias of a fifth of an
ULP that no absolute measure shows; `error_ratio` is the acceptance measure of flash-attn's tests.
"""

import torch
from torch import Tensor

from attention_kernels.choices import input_format
from attention_kernels.formats import Format
from stability.metrics.ulp import signed_ulp_error

__all__ = ["DEVIATION_METRICS", "GOLDEN_METRICS", "deviation", "deviation_tensor", "golden_tensor"]

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
    `output_format`, by default x's own format, at the reference.

    With e = x - r over the n compared values: `std` that of e, `rmse` = sqrt(mean e^2), `rel_fro` =
    |e| / |r|, `sqnr_db` = 20 log10(|r| / |e|), `bias_ulp` the mean and `ulp_max` the largest of e
    in ULPs, `bias_ulp_se` = std(e in ULPs) / sqrt(n), which takes errors as independent.
    `nonfinite` counts values of x. Equal values, all zero or not, have rel_fro 0, cosine 1 and an
    infinite sqnr_db; a cosine with a zero vector is else NaN. With nothing to compare all but
    `nonfinite` are NaN. ValueError for unequal or empty shapes, a dtype that is no format, an
    unknown format, or a mask that does not fit.
    """
    _check("deviation_tensor", {"x": x, "reference": reference})
    output_format = output_format or input_format(x.dtype)
    x64, r64 = x.detach().double(), reference.detach().double()
    inside = _inside(x64, valid)
    finite = torch.isfinite(x64)
    nonfinite = (inside & ~finite).sum().double()
    (x64, r64), n = _compared(inside & finite & torch.isfinite(r64), x64, r64)
    compared = _compared_metrics(x64, r64, n, output_format)
    return torch.cat([torch.where(n > 0, compared, torch.nan), nonfinite.unsqueeze(0)])


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
    c64, b64, g64 = (tensor.detach().double() for tensor in (candidate, baseline, golden))
    finite = torch.isfinite(c64) & torch.isfinite(b64) & torch.isfinite(g64)
    (c64, b64, g64), n = _compared(finite, c64, b64, g64)
    candidate_error, baseline_error, norm = (c64 - g64).norm(), (b64 - g64).norm(), g64.norm()
    ratio = torch.where(candidate_error == baseline_error, 1.0, candidate_error / baseline_error)
    metrics = torch.stack([ratio, _ratio(candidate_error, norm), _ratio(baseline_error, norm)])
    return torch.where(n > 0, metrics, torch.nan)


def _compared_metrics(x64: Tensor, r64: Tensor, n: Tensor, output_format: str | Format) -> Tensor:
    """Return all metrics but `nonfinite`; values that are not compared must be 0 in x and r."""
    error = x64 - r64
    ulps = signed_ulp_error(x64, r64, output_format)
    bias, bias_ulp = error.sum() / n, ulps.sum() / n
    mean_square, mean_square_ulp = error.square().sum() / n, ulps.square().sum() / n
    size, norm = error.abs(), r64.norm()
    error_norm, largest = error.norm(), size.amax()
    cosine = ((x64 * r64).sum() / (x64.norm() * norm)).clamp(-1.0, 1.0)
    return torch.stack(
        [
            largest,
            size.sum() / n,
            _std(mean_square, bias),
            mean_square.sqrt(),
            _ratio(error_norm, norm),
            torch.where(largest == 0, 1.0, cosine),
            torch.where(largest == 0, torch.inf, 20 * torch.log10(norm / error_norm)),
            bias,
            bias_ulp,
            _std(mean_square_ulp, bias_ulp) / n.sqrt(),
            ulps.abs().amax(),
        ]
    )


def _check(function: str, tensors: dict[str, Tensor]) -> None:
    shapes = [tuple(tensor.shape) for tensor in tensors.values()]
    if len(set(shapes)) > 1 or 0 in shapes[0]:
        raise ValueError(
            f"{function}: {', '.join(tensors)} must have one shape and hold values, got "
            f"{', '.join(map(str, shapes))}; compare results on the same inputs"
        )


def _inside(x64: Tensor, valid: Tensor | None) -> Tensor:
    """Return which values are no padding, shaped as x64."""
    if valid is None:
        return torch.ones_like(x64, dtype=torch.bool)
    try:
        if valid.dtype == torch.bool:
            return valid.expand(x64.shape[:-1]).unsqueeze(-1).expand_as(x64)
    except RuntimeError:
        pass  # does not broadcast
    raise ValueError(
        f"deviation_tensor: valid must be bool and broadcast to {tuple(x64.shape[:-1])}, got "
        f"{valid.dtype} {tuple(valid.shape)}; give one flag for each position"
    )


def _compared(which: Tensor, *tensors: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return the tensors with 0 wherever `which` is false, and how many values are left."""
    return [torch.where(which, tensor, 0.0) for tensor in tensors], which.sum().double()


def _std(mean_square: Tensor, mean: Tensor) -> Tensor:
    # rounding of the difference is below 1e-8 of the mean, and the mean is shown beside it
    return (mean_square - mean.square()).clamp(min=0.0).sqrt()


def _ratio(error: Tensor, norm: Tensor) -> Tensor:
    """Return error / norm; no error at all is 0 also when the reference is zero."""
    return torch.where(error == 0, 0.0, error / norm)
