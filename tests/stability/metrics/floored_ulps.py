"""Errors in ULPs, written plainly: at the reference, and at max(|reference|, RMS / 16)."""

import numpy as np
from torch import Tensor

from stability.metrics.ulp import ulp_size

_MANTISSA_BITS_AND_LEAST_EXPONENT = {
    "bf16": (7, -126),
    "fp16": (10, -14),
    "fp32": (23, -126),
    "fp64": (52, -1022),
}


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


def bias_and_error(ulps: np.ndarray) -> tuple[float, float]:
    """Return `bias_ulp` and `bias_ulp_se` of errors in ULPs."""
    return float(ulps.mean()), float(ulps.std() / ulps.size**0.5)
