"""How far a result is from the golden, in numbers: pure functions on tensors, all in FP64.

A result is `(batch, heads, positions, width)`: out and dq by query, dk and dv by key, the LSE with
a width of 1. Four statistics describe its error:

- the *error ratio*: its RMS error over plain attention's, both against the golden, where plain
  attention's is never taken below what rounding alone costs (`calls.floor`);
- the *gain*: the slope of the result on the golden less 1, for a factor that is off;
- the *bias*: the mean signed error in ULPs of the output format, for a rounding to one side;
- the *angle* to the golden, in radians, which no factor changes.

Elements of one result are not independent: they share rows, keys and statistics. So a standard
error is always taken over looks, which are independent draws (`over_looks`), or, within a single
call, over rows (`log_error`, `slope`). Leaves out which of them is too large (`limits`).
"""

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.formats import Format
from attention_kernels.testing.golden_faults import spacing

__all__ = [
    "Estimate",
    "angle",
    "bias_ulp",
    "gain",
    "log_error",
    "over_looks",
    "slope",
    "t_quantile",
]


class Estimate(NamedTuple):
    """A mean over independent looks, its standard error, and how many looks there were."""

    value: float
    error: float
    looks: int

    def surely_beyond(self, limit: float, chance: float) -> bool:
        """Whether |value| exceeds `limit` by more than chance alone gives with this probability."""
        if self.looks < 2:
            return False
        return abs(self.value) - t_quantile(chance, self.looks - 1) * self.error > limit


def over_looks(values: Sequence[float]) -> Estimate:
    """Return the mean of one value a look, with the standard error of independent looks."""
    looks = len(values)
    mean = math.fsum(values) / looks
    if looks < 2:
        return Estimate(mean, math.inf, looks)
    squares = math.fsum((value - mean) ** 2 for value in values)
    return Estimate(mean, math.sqrt(squares / (looks - 1) / looks), looks)


def gain(x: Tensor, golden: Tensor) -> Tensor:
    """Return the slope of x on the golden less 1, `(batch, heads)`; 0 where the golden is 0."""
    x, golden = x.double(), golden.double()
    power = golden.square().sum((-1, -2))
    slope = ((x - golden) * golden).sum((-1, -2))
    return torch.where(power > 0, slope / power.clamp(min=torch.finfo(power.dtype).tiny), 0.0)


def slope(along: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slope of sum(along) on sum(power), and its standard error over rows, `(rows,)`.

    A ratio of sums, whose error is that of what each row leaves of it; infinite for a single row.
    """
    rows, total = len(power), power.sum()
    if total == 0:
        return total, total
    value = along.sum() / total
    if rows < 2:
        return value, torch.full_like(value, math.inf)
    left = along - value * power
    return value, (left.square().sum() * rows / (rows - 1)).sqrt() / total


def bias_ulp(x: Tensor, golden: Tensor, format: Format, *, outward: bool = False) -> Tensor:
    """Return the mean signed error in ULPs at max(|golden|, RMS/16), `(batch, heads)`.

    `outward` counts an error away from zero as positive, in place of one upwards.
    """
    x, golden = x.double(), golden.double()
    rms = golden.square().mean((-1, -2), keepdim=True).sqrt()
    error = (x - golden) / spacing(torch.maximum(golden.abs(), rms / 16), format)
    return (error * golden.sign() if outward else error).mean((-1, -2))


def angle(x: Tensor, golden: Tensor) -> Tensor:
    """Return the angle between x and the golden in radians, `(batch, heads)`."""
    x, golden = x.double(), golden.double()
    lengths = x.square().sum((-1, -2)).sqrt(), golden.square().sum((-1, -2)).sqrt()
    unit_x, unit_golden = (
        v / n.clamp(min=1e-300)[..., None, None] for v, n in zip((x, golden), lengths, strict=True)
    )
    # the half angle by its sine: the arc cosine of nearly 1 would lose half of the digits
    half = (unit_x - unit_golden).square().sum((-1, -2)).sqrt() / 2
    both = (lengths[0] > 0) & (lengths[1] > 0)
    return torch.where(both, 2 * half.clamp(max=1).asin(), 0.0)


def log_error(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the RMS of errors whose squares are summed by row, and its standard error.

    `rows` is `(..., rows)`. Rows are the clusters: a wrong delta moves a row of dq as a whole.
    """
    total = rows.sum(-1)
    safe = total.clamp(min=torch.finfo(rows.dtype).tiny)
    error = 0.5 * rows.square().sum(-1).sqrt() / safe
    return 0.5 * (safe / rows.shape[-1]).log(), error


@functools.lru_cache(maxsize=256)
def t_quantile(chance: float, freedom: int) -> float:
    """Return the t that |T| exceeds with probability `chance` at so many degrees of freedom."""
    low, high = 0.0, 1.0
    while _t_tail(high, freedom) > chance:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_tail(middle, freedom) > chance else (low, middle)
    return high


def _t_tail(t: float, freedom: int) -> float:
    """Return P(|T| > t): with t = sqrt(freedom) tan(x), the density is cos(x)^(freedom - 1)."""
    start = math.atan2(t, math.sqrt(freedom))
    norm = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi)
    steps = 400
    width = (math.pi / 2 - start) / steps
    middles = (start + (i + 0.5) * width for i in range(steps))
    return min(1.0, 2 * norm * width * math.fsum(math.cos(x) ** (freedom - 1) for x in middles))
