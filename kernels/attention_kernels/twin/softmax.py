"""The running maximum of the twin: what is subtracted before the exponential, and when it moves.

Three rules decide it. The plain one takes the largest score so far. `repeated_max_beta` (arXiv
2510.04212, section 4) moves a block's maximum where it occurs more than once, so that no
probability is exactly 1 and ties of P v have no one direction. `rescale_threshold`
(FlashAttention-4) keeps an old maximum that is only a little too small, and spares the rescaling.
None of them matters in exact arithmetic. Leaves out the exponential (`twin_arithmetic`).

Shape suffixes: N batch x query heads, I rows of a query block, J keys of a key block.
"""

import math

import torch
from torch import Tensor

from attention_kernels.numerics import Softmax

__all__ = ["block_maximum", "kept_maximum"]

MAX_SHIFT = 6.0
"""How far beta may move a maximum. Without a bound a score of 20 at beta 7 would leave exp(-120),
nothing. Beyond it whole factors of two are taken back, so that every P keeps the mantissa, and so
the roundings, that the published rule gives it."""
_LOG_2 = math.log(2)


def block_maximum(scores_NIJ: Tensor, softmax: Softmax) -> Tensor:
    """Return the maximum of each row of a block, `(N, I, 1)`, moved where it is repeated."""
    max_NI1 = scores_NIJ.amax(dim=-1, keepdim=True)
    if softmax.repeated_max_beta == 1.0:
        return max_NI1
    repeated_NI1 = (scores_NIJ == max_NI1).sum(dim=-1, keepdim=True) > 1
    shift_NI1 = max_NI1.clamp(min=0.0) * softmax.repeated_max_beta - max_NI1
    doublings_NI1 = torch.ceil((shift_NI1 - MAX_SHIFT) / _LOG_2).clamp(min=0.0)
    moved_NI1 = max_NI1 + (shift_NI1 - doublings_NI1 * _LOG_2)
    return torch.where(repeated_NI1 & (max_NI1 > -torch.inf), moved_NI1, max_NI1)


def kept_maximum(old_NI1: Tensor, new_NI1: Tensor, softmax: Softmax) -> Tensor:
    """Return the old maximum where the new one exceeds it by no more than the threshold."""
    if softmax.rescale_threshold == 0.0:
        return new_NI1
    growth_NI1 = (new_NI1 - old_NI1) * math.log2(math.e)
    return torch.where(growth_NI1 <= softmax.rescale_threshold, old_NI1, new_NI1)
