"""Exact sums over the values of two tensors: the same bits in any order, on any device, in any shards.

How. Adding floating-point numbers rounds, and what it rounds to depends on the order. So nothing is
added that way. A term is an FP64 number, an integer of 53 bits times a power of two: the integer is
added to one of 2,046 bins, which the power names, as two halves that 64-bit integers hold for 2^31
terms. Bins of several chunks, tensors or ranks are added as they are; in the end they make one
integer of Python's, and it is rounded once. (A small superaccumulator: Neal, arXiv 1505.05571.)

Squares of FP32 weights are exact in FP64, and so is nearly each difference; of FP64 weights what the
square of b rounds off is a term of its own, since the variance of b is a difference of sums.

What it costs. 7 ns a pair of values on a CPU, as FP64 sums do that round.

Leaves out which metrics are made of the sums (`drift`).
"""

import math
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

__all__ = ["ExactSum", "PairSums", "pair_sums"]

_UNIT = 1074
"""A sum is an integer in units of 2^-1074, the least FP64 number above 0."""
_SPECIAL = 2047
"""The bin that counts infinities: positive ones in its low half, negative ones in its high half."""
_NAN = 2048
"""The bin that counts what is no number."""
_BINS = 2049
_HALF = 32
"""Bits of a term's integer in the low half of its bin, 21 and the sign in the high half."""
_CHUNK = 2**30
"""Pairs after which halves are carried, so that none can overflow."""
_BATCH = 2**22
"""Pairs at once where torch adds them up: a dozen copies of FP64 are in memory."""
_TERMS = ("b", "abs_error", "a_square", "b_square", "error_square")
_SAFE = (1e-140, 1e140)
"""FP64 values between these are split in two, and their halves multiplied, without leaving FP64."""


@dataclass(frozen=True, slots=True)
class ExactSum:
    """A sum that no order can change: an integer of units of 2^-1074, and what is not finite."""

    units: int = 0
    special: float = 0.0
    """0, or the infinity or NaN that the terms which are not finite add up to."""

    def __add__(self, other: Self) -> Self:
        return type(self)(self.units + other.units, self.special + other.special)

    def __float__(self) -> float:
        """Return the sum, rounded once; infinite beyond FP64."""
        return _rounded(self.units, 1 << _UNIT) + self.special


@dataclass(frozen=True, kw_only=True, slots=True)
class PairSums:
    """What the pairs of a tensor a and a tensor b add up to; `+` joins those of two shards."""

    count: int = 0
    flips: int = 0
    """Pairs of which one is positive and the other negative."""
    max_abs: float = 0.0
    """The largest |a - b|; NaN if one is no number."""
    b: ExactSum = ExactSum()
    abs_error: ExactSum = ExactSum()
    """Of |a - b|."""
    a_square: ExactSum = ExactSum()
    b_square: ExactSum = ExactSum()
    error_square: ExactSum = ExactSum()
    """Of (a - b)^2."""

    def __add__(self, other: Self) -> Self:
        added = {
            name: getattr(self, name) + getattr(other, name) for name in ("count", "flips", *_TERMS)
        }
        either = (self.max_abs, other.max_abs)
        # max alone keeps or drops a NaN by its place
        largest = math.nan if any(map(math.isnan, either)) else max(either)
        return type(self)(max_abs=largest, **added)

    @property
    def dot(self) -> float:
        """The sum of ab, rounded once: 2ab is a^2 + b^2 - (a - b)^2, without cancellation here."""
        units = self.a_square.units + self.b_square.units - self.error_square.units
        special = self.a_square.special + self.b_square.special - self.error_square.special
        return float(ExactSum(units, special)) / 2

    @property
    def b_variance(self) -> float:
        """The mean of (b - mean of b)^2, rounded once."""
        special = self.b.special * 0 + self.b_square.special
        spread = (self.b_square.units * self.count << _UNIT) - self.b.units**2
        # below 0 only by what single squares of FP64 values have rounded off
        return _rounded(max(spread, 0), (self.count << _UNIT) ** 2) + special


def _rounded(numerator: int, denominator: int) -> float:
    """Return the quotient, rounded once; infinite beyond FP64."""
    try:
        return numerator / denominator
    except OverflowError:
        return math.inf if numerator > 0 else -math.inf


def pair_sums(a: Tensor, b: Tensor) -> PairSums:
    """Return the sums over all pairs of two flat tensors, of FP32 or FP64, of one length and device."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    total = PairSums()
    for first, second in zip(a.split(_CHUNK), b.split(_CHUNK), strict=True):
        add = _add_on_cpu if a.device.type == "cpu" else add_by_torch
        bins, flips, largest = add(first.detach(), second.detach())
        sums = dict(zip(_TERMS, map(_sum_of_bins, bins), strict=True))
        total += PairSums(count=first.numel(), flips=flips, max_abs=largest, **sums)
    return total


Added = tuple[np.ndarray[Any, Any], int, float]
"""Bins of each term, (terms, 2, bins); how many signs flip; the largest difference."""


def _sum_of_bins(bins: np.ndarray[Any, Any]) -> ExactSum:
    low, high = bins
    units = 0
    for power in np.flatnonzero(low[:_SPECIAL] | high[:_SPECIAL]).tolist():
        # subnormal numbers, of power 0, have the unit of those of power 1
        units += ((int(high[power]) << _HALF) + int(low[power])) << max(power - 1, 0)
    infinite, negative, nan = bool(low[_SPECIAL]), bool(high[_SPECIAL]), bool(low[_NAN])
    special = (math.inf if infinite else 0.0) - (math.inf if negative else 0.0)
    return ExactSum(units, math.nan if nan else special)


def _add_on_cpu(a: Tensor, b: Tensor) -> Added:
    from stability.metrics.exact_loop import add_pairs  # compiled, or read from numba's cache

    bins = np.zeros((len(_TERMS), 2, _BINS), np.int64)
    flips, largest = add_pairs(a.numpy(), b.numpy(), bins)
    return bins, int(flips), float(largest)


def add_by_torch(a: Tensor, b: Tensor) -> Added:
    """Return what `_add_on_cpu` does, by torch's operators: on any device, and slower on a CPU."""
    bins = torch.zeros(len(_TERMS), 2, _BINS, dtype=torch.int64, device=a.device)
    flips = torch.zeros((), dtype=torch.int64, device=a.device)
    largest = torch.zeros((), dtype=torch.float64, device=a.device)
    is_wide = a.dtype == torch.float64
    for first, second in zip(a.split(_BATCH), b.split(_BATCH), strict=True):
        x, y = first.double(), second.double()
        error = x - y
        flips += (x.sign() * y.sign() < 0).sum()
        largest = torch.maximum(largest, error.abs().max())
        square = y * y
        for into, term in zip(bins, (y, error.abs(), x * x, square, error * error), strict=True):
            _put(term, into)
        if is_wide:
            _put(_rounded_off(y, square), bins[3])
    return bins.cpu().numpy(), int(flips), float(largest)


def _put(terms: Tensor, bins: Tensor) -> None:
    word = terms.view(torch.int64)
    power = (word >> 52) & 0x7FF
    integer = (word & ((1 << 52) - 1)) | ((power > 0).long() << 52)
    integer = torch.where(word < 0, -integer, integer)
    low, high = integer & ((1 << _HALF) - 1), integer >> _HALF
    is_special, is_nan = power == _SPECIAL, terms.isnan()
    power = torch.where(is_nan, _NAN, power)
    low = torch.where(is_special, (is_nan | (terms > 0)).long(), low)
    high = torch.where(is_special, (terms < 0).long(), high)
    bins[0].scatter_add_(0, power, low)
    bins[1].scatter_add_(0, power, high)


def _rounded_off(y: Tensor, square: Tensor) -> Tensor:
    least, most = _SAFE
    y = torch.where((y.abs() > least) & (y.abs() < most), y, 0.0)
    high = y * 134217729.0
    high = high - (high - y)
    low = y - high
    found = ((high * high - square) + 2.0 * high * low) + low * low
    return torch.where(y == 0, 0.0, found)
