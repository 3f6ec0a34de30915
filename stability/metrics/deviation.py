"""Deviation: how far an attention's result x is from a reference r on the same inputs.

Everything is accumulated in FP64 on the tensors' device and stays there as one small tensor, so
that a probe can gather all layers and transfer once. Positions where x or r is not finite count in
`nonfinite` alone: one NaN must not blank every other figure. Leaves out ULPs (`ulp`) and names.

`bias` and `bias_ulp` are signed because the failure in arXiv 2510.04212 is a bias of a fifth of an
ULP that no absolute measure shows; `error_ratio` is the acceptance measure of flash-attn's tests.
"""

import torch
from torch import Tensor

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
    x: Tensor, reference: Tensor, *, output_format: str, valid: Tensor | None = None
) -> Tensor:
    """Return the metrics of `DEVIATION_METRICS`, in that order, as FP64 on x's device.

    x and reference have one shape `(..., head_dim)`; `valid` is bool and broadcasts to `(...)`:
    false positions (padding) are left out. ULPs are those of `output_format`. No host sync.
    With e = x - r over n compared values: `std` = sqrt(mean(e^2) - mean(e)^2), `rel_fro` =
    |e| / |r|, `sqnr_db` = 20 log10(|r| / |e|) (infinite if equal), `bias_ulp_se` the standard error
    of `bias_ulp`. Equal tensors have cosine 1 exactly. ValueError if the shapes differ.
    """
    if x.shape != reference.shape:
        raise ValueError(
            "deviation_tensor: x and reference must have one shape, got "
            f"{tuple(x.shape)} and {tuple(reference.shape)}"
        )
    x64, r64 = x.double(), reference.double()
    inside = torch.ones_like(x64, dtype=torch.bool)
    if valid is not None:
        inside &= valid.unsqueeze(-1)
    finite = inside & torch.isfinite(x64) & torch.isfinite(r64)
    x64, r64 = torch.where(finite, x64, 0.0), torch.where(finite, r64, 0.0)
    n = finite.sum().double()
    error = x64 - r64
    ulps = signed_ulp_error(x64, r64, output_format)  # zero where nothing is compared

    bias, bias_ulp = error.sum() / n, ulps.sum() / n
    mean_square = error.square().sum() / n
    error_norm, norm, x_norm = error.norm(), r64.norm(), x64.norm()
    cosine = (x64 * r64).sum() / (x_norm * norm)
    ulp_variance = (ulps.square().sum() / n - bias_ulp.square()).clamp(min=0.0)
    return torch.stack(
        [
            error.abs().amax(),
            error.abs().sum() / n,
            (mean_square - bias.square()).clamp(min=0.0).sqrt(),
            mean_square.sqrt(),
            _ratio(error_norm, norm),
            torch.where(error_norm == 0, 1.0, cosine),
            20 * torch.log10(norm / error_norm),
            bias,
            bias_ulp,
            (ulp_variance / n).sqrt(),
            ulps.abs().amax(),
            (inside & ~torch.isfinite(x.double())).sum().double(),
        ]
    )


def deviation(
    x: Tensor, reference: Tensor, *, output_format: str, valid: Tensor | None = None
) -> dict[str, float]:
    """Return the metrics of `deviation_tensor` by name, on the host."""
    values = deviation_tensor(x, reference, output_format=output_format, valid=valid).tolist()
    return dict(zip(DEVIATION_METRICS, values, strict=True))


def golden_tensor(candidate: Tensor, baseline: Tensor, golden: Tensor) -> Tensor:
    """Return the metrics of `GOLDEN_METRICS`, in that order, as FP64 on the device. No host sync.

    `error_ratio` = |candidate - golden| / |baseline - golden|; where both are exact it is 1. The
    other two are each one's error relative to |golden|.
    """
    g64 = golden.double()
    candidate_error = (candidate.double() - g64).norm()
    baseline_error = (baseline.double() - g64).norm()
    norm = g64.norm()
    ratio = torch.where(candidate_error == baseline_error, 1.0, candidate_error / baseline_error)
    return torch.stack([ratio, _ratio(candidate_error, norm), _ratio(baseline_error, norm)])


def _ratio(error: Tensor, norm: Tensor) -> Tensor:
    """Return error / norm; no error at all is 0 also when the reference is zero."""
    return torch.where(error == 0, 0.0, error / norm)
