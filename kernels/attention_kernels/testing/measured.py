"""What a check measures in one cell: each result's statistics by batch entry, head and row.

Shape suffixes: B batch, H heads of the result, R its rows (queries, or keys for dk and dv).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, input_format
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.statistics import angle, bias_ulp, gain, log_error, slope

__all__ = ["RANGE", "Measured", "measure"]

RANGE = 16
"""Rows in a range of positions."""
_ENORMOUS = 1e15


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One result in one cell: its errors, and those of plain attention, against the golden."""

    where: Reference
    result: str
    values: Tensor
    """The result itself, in its own dtype."""
    squared_errors: Tensor
    """Squared error of each row."""
    squared_noise: Tensor
    """Squared error allowed for in each row: plain attention's, or the floor."""
    gains: Tensor
    baseline_gains: Tensor
    biases: Tensor
    baseline_biases: Tensor
    outward: Tensor
    """The bias away from zero."""
    baseline_outward: Tensor
    angles: Tensor
    along: Tensor
    """Error times golden, summed over each row: what a gain is the sum of."""
    baseline_along: Tensor
    power: Tensor
    """The golden's square, summed over each row."""

    def gain_of_heads(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return each head's gain over the batch, its standard error, and plain attention's own.

        `(H + 1,)` each: the last value is that of all heads. 0 where the golden is 0.
        """
        gains, errors, baseline = [], [], []
        for head in (*range(self.power.shape[1]), slice(None)):
            along, theirs, power = (
                x[:, head].flatten() for x in (self.along, self.baseline_along, self.power)
            )
            value, error = slope(along, power)
            gains, errors = [*gains, value], [*errors, error]
            baseline.append(slope(theirs, power)[0])
        return torch.stack(gains), torch.stack(errors), torch.stack(baseline)

    def log_ratio(self) -> tuple[Tensor, Tensor]:
        """Return the log of the error ratio by batch entry and head, and its standard error."""
        return _log_ratio(self.squared_errors, self.squared_noise)

    def log_ratio_of_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the log of the error ratio of each range of positions, over batch and heads."""
        error, noise = (
            _ranges(x).flatten(0, 1).mT for x in (self.squared_errors, self.squared_noise)
        )
        return _log_ratio(error, noise)

    def row_ratio(self) -> Tensor:
        """Return the error ratio of each row, `(B, H, R)`."""
        return (self.squared_errors / self.row_noise()).sqrt()

    def row_noise(self) -> Tensor:
        """Return the squared error to hold a single row against, `(B, H, R)`.

        A row's own noise can be next to nothing by luck, since a row of dq has one delta: what the
        rows around it have, in any batch entry and head, is its least.
        """
        around = _ranges(self.squared_noise).mean((0, 1)) / RANGE
        around = around.repeat_interleave(RANGE)[: self.squared_noise.shape[-1]]
        short = self.squared_noise.shape[-1] % RANGE
        if short:
            around[-short:] *= RANGE / short
        # rows that attend no key have no noise, and every error in them is too large
        least = (1e-6 * self.squared_noise.mean()).clamp(min=1e-60)
        return torch.maximum(self.squared_noise, around).clamp(min=least)


def _log_ratio(error: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    (top, top_error), (bottom, bottom_error) = log_error(error), log_error(noise)
    return top - bottom, (top_error.square() + bottom_error.square()).sqrt()


def _ranges(rows: Tensor) -> Tensor:
    """Return the sum over each range of rows, `(B, H, ranges)`."""
    short = -rows.shape[-1] % RANGE
    return torch.nn.functional.pad(rows, (0, short)).unflatten(-1, (-1, RANGE)).sum(-1)


def measure(where: Reference, result: str, x: Tensor) -> Measured:
    """Return the statistics of the result `x`; an infinity that the golden has too is no error."""
    golden, baseline = where.golden[result], where.baseline[result].double()
    values, x = x, x.double()
    infinite = ~golden.isfinite()
    # a number where an infinity must be is no smaller an error than another infinity
    missing = infinite & x.isfinite()
    x, baseline = (y.masked_fill(infinite & (y == golden), 0.0) for y in (x, baseline))
    x = x.masked_fill(missing, _ENORMOUS)
    golden = golden.masked_fill(infinite, 0.0)
    # an infinity where there must be none is an error too large for any limit, and still a number
    x = x.nan_to_num(_ENORMOUS, _ENORMOUS, -_ENORMOUS)
    format = FORMATS["fp32" if result == "lse" else input_format(where.dtype)]
    return Measured(
        where=where,
        result=result,
        values=values,
        squared_errors=(x - golden).square().sum(-1),
        squared_noise=where.noise(result),
        gains=gain(x, golden),
        baseline_gains=gain(baseline, golden),
        biases=bias_ulp(x, golden, format),
        baseline_biases=bias_ulp(baseline, golden, format),
        outward=bias_ulp(x, golden, format, outward=True),
        baseline_outward=bias_ulp(baseline, golden, format, outward=True),
        angles=angle(x, golden),
        along=((x - golden) * golden).sum(-1),
        baseline_along=((baseline - golden) * golden).sum(-1),
        power=golden.square().sum(-1),
    )
