"""In which units a softmax keeps its scores, and what turns a score into the exponent of a weight.

FlashAttention's CUDA code (2 and 3, `softmax.h`) never multiplies a score by the scale: it keeps
s = q k^T as the product leaves it, takes maxima of that, and computes a weight as exp2 of one fused
multiply-add, fma(s, c, -(m c)) with c = scale log2 e. That is fewer instructions, and other bits:
the scaled score is never rounded, m c is, and so the largest weight of a row need not be exactly 1.
An `exp` with `_folded` is that. Where something is added to scaled scores (softcap,
bias, ALiBi, sinks), where they are rounded or moved, or where a scale is not positive, so that it
would not keep the order of scores, they are scaled first, and c = log2 e.
"""

import math
import struct
from typing import NamedTuple

from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics

__all__ = ["LOG2_E", "ScoreUnits", "score_units"]

LOG2_E = math.log2(math.e)


class ScoreUnits(NamedTuple):
    """What scores are multiplied by, and when."""

    before: float
    """Multiplied onto the products of q and k."""
    natural: float
    """A kept score times this is what e is raised to: the LSE is in these units."""
    log2: float | None
    """A kept score times this, a value of the work format, is what 2 is raised to, in one fused
    operation; None where there is no fused operation."""


def score_units(numerics: FlashNumerics, mask: Mask, scale: float) -> ScoreUnits:
    """Return the units of a call; `numerics` is resolved."""
    if not numerics.softmax.folds:
        return ScoreUnits(scale, 1.0, None)
    added = (mask.bias, mask.alibi_slopes, mask.sinks)
    plain = mask.softcap == 0 and all(x is None for x in added)
    unmoved = numerics.softmax.repeated_max_beta == 1.0 and numerics.targets["scores"] is None
    if plain and unmoved and scale > 0:
        return ScoreUnits(1.0, scale, _held(scale * LOG2_E, numerics))
    return ScoreUnits(scale, 1.0, _held(LOG2_E, numerics))


def _held(x: float, numerics: FlashNumerics) -> float:
    """Return a number as the work format holds it."""
    return x if numerics.work_format == "fp64" else struct.unpack("f", struct.pack("f", x))[0]
