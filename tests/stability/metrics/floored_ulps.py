"""The size of a ULP, and errors in ULPs written plainly: at the reference and at a floor."""

import numpy as np
import torch
from torch import Tensor

from attention_kernels.formats import Format, format_named
from attention_kernels.rounding import INPUT_DTYPES

_FP64_MANTISSA_BITS, _FP64_BIAS, _FP64_EXPONENT_MASK = 52, 1023, 0x7FF
_MANTISSA_BITS_AND_LEAST_EXPONENT = {
    "bf16": (7, -126),
    "fp16": (10, -14),
    "fp32": (23, -126),
    "fp64": (52, -1022),
}


def ulp_size(x: Tensor, format: str | Format) -> Tensor:
    """Return the spacing of `format` at |x|, in FP64 and the shape of x; x is taken as FP64.

    In [2^e, 2^(e+1)) it is 2^(e - mantissa_bits). Below the smallest normal value, zero included,
    it is the spacing of the subnormals; beyond the largest value, the spacing just below that.
    NaN and infinity give NaN.
    """
    target = format if isinstance(format, Format) else format_named(format)
    x64 = x.detach().double()
    exponent = (x64.view(torch.int64) >> _FP64_MANTISSA_BITS) & _FP64_EXPONENT_MASK
    exponent.sub_(_FP64_BIAS).clamp_(min=target.min_exponent, max=target.max_exponent)
    power = (exponent.add_(_FP64_BIAS) << _FP64_MANTISSA_BITS).view(torch.float64)
    return torch.where(torch.isfinite(x64), power * 2.0**-target.mantissa_bits, torch.nan)


def signed_ulp_error(x: Tensor, reference: Tensor, format: str) -> Tensor:
    """Return (x - reference) in ULPs of `format` at the reference, however small it is."""
    return (x.detach().double() - reference.detach().double()) / ulp_size(reference, format)


def floored_ulps(x: Tensor, reference: Tensor, format: str) -> np.ndarray:
    """Return the signed errors in their shape; all of the reference, which is finite, is valid."""
    a, r = x.double().numpy(), reference.double().numpy()
    mantissa_bits, least = _MANTISSA_BITS_AND_LEAST_EXPONENT[format]
    size = np.maximum(np.abs(r), np.sqrt(np.mean(r * r)) / 16)
    size = np.maximum(size, 2.0**least)
    return (a - r) / 2.0 ** (np.floor(np.log2(size)) - mantissa_bits)


def golden_metrics(
    candidate: Tensor, baseline: Tensor, golden: Tensor, cut=...
) -> dict[str, float]:
    """Return `GOLDEN_COLUMNS` of the part `cut`, by name; the floor of ULPs is that of each head of
    each sequence of the whole. All values are finite.
    """
    mantissa_bits, least = _MANTISSA_BITS_AND_LEAST_EXPONENT[INPUT_DTYPES[candidate.dtype]]
    g = golden.double().numpy()
    rms = np.sqrt(np.mean(g * g, axis=(-2, -1), keepdims=True))
    size = np.maximum(np.maximum(np.abs(g), rms / 16), 2.0**least)
    ulp = (2.0 ** (np.floor(np.log2(size)) - mantissa_bits))[cut]
    g, c, b = g[cut], candidate.double().numpy()[cut], baseline.double().numpy()[cut]
    norm, error, baseline_error = (np.linalg.norm(x) for x in (g, c - g, b - g))
    rounding = np.linalg.norm(ulp) / 12**0.5
    return {
        "error_ratio": error / max(baseline_error, rounding),
        "golden_candidate_rel_fro": error / norm,
        "golden_baseline_rel_fro": baseline_error / norm,
        "gain": (c * g).sum() / (g * g).sum() - 1,
        "gain_baseline": (b * g).sum() / (g * g).sum() - 1,
        "golden_bias_ulp": ((c - g) / ulp).mean(),
        "golden_bias_ulp_baseline": ((b - g) / ulp).mean(),
        "baseline_over_rounding": baseline_error / rounding,
        "golden_nonfinite": 0.0,
    }


def bias_and_error(ulps: np.ndarray) -> tuple[float, float]:
    """Return `bias_ulp` and `bias_ulp_se` of errors in ULPs."""
    return float(ulps.mean()), float(ulps.std() / ulps.size**0.5)
