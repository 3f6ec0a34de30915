"""Exact sums over the values of two tensors: the same bits in any order, shards, or on any device.

How. Adding floating-point numbers rounds, and what it rounds to depends on the order. So nothing is
added that way. A term is an FP64 number, an integer of 53 bits times a power of two: the integer is
added to one of 2,046 bins, which the power names, as two halves that 64-bit integers hold for 2^31
terms. They make one integer of Python's, which is joined with that of other values by adding them,
and is rounded once, in the end. (A small superaccumulator: Neal, arXiv 1505.05571.) On a CPU, FP32
values are added up as integers in blocks before they reach a bin (`exact_loop`).

Squares of FP32 weights are exact in FP64, and so is nearly each difference. Of FP64 weights, what
the square of b rounds off is a term of its own, since b's variance is a difference of sums.

What it costs. On a CPU 2.2 ns a pair of FP32 values for all sums and 0.6 ns a square alone (a core
of an AMD EPYC with AVX2, numba 0.68). A pair of FP64 values takes 13 to 27 ns, as sums by torch do.

Leaves out which metrics are made of the sums (`drift`).
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = [
    "ExactSum",
    "PairSums",
    "Values",
    "add_by_torch",
    "add_squares_",
    "carry_",
    "empty_bins",
    "gap_sum",
    "merged_gap_sum",
    "new_bins",
    "pair_sums",
    "sum_of_bins",
    "value_sum",
    "weighted_sum",
]

Values = NDArray[Any]
"""A flat array of FP32 or FP64."""

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

    @classmethod
    def of(cls, value: float, times: int) -> Self:
        """Return a finite value, so many times."""
        numerator, denominator = value.as_integer_ratio()
        return cls(times * numerator * ((1 << _UNIT) // denominator))

    def __add__(self, other: Self) -> Self:
        return type(self)(self.units + other.units, self.special + other.special)

    def __float__(self) -> float:
        """Return the sum, rounded once; infinite beyond FP64."""
        return self.mean(1)

    def mean(self, count: int) -> float:
        """Return the sum over `count`, rounded once; infinite beyond FP64."""
        return _rounded(self.units, count << _UNIT) + self.special


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
        """The sum of ab: 2ab is a^2 + b^2 - (a - b)^2, without cancellation in integers."""
        units = self.a_square.units + self.b_square.units - self.error_square.units
        special = self.a_square.special + self.b_square.special - self.error_square.special
        return float(ExactSum(units, special)) / 2

    @property
    def b_variance(self) -> float:
        """The mean of (b - mean of b)^2."""
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
    """Return the sums over all pairs of two flat FP32 or FP64 tensors of one length and device."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    total = PairSums()
    for first, second in _chunks(a, b):
        add = _add_on_cpu if a.device.type == "cpu" else add_by_torch
        bins, flips, largest = add(first, second)
        sums = dict(zip(_TERMS, map(sum_of_bins, bins), strict=True))
        total += PairSums(count=first.numel(), flips=flips, max_abs=largest, **sums)
    return total


def gap_sum(a: Tensor, b: Tensor) -> ExactSum:
    """Return the sum of |x - y| over all pairs of two flat tensors; inf less inf is 0."""
    if a.dtype != b.dtype:
        a, b = a.double(), b.double()
    total = ExactSum()
    for first, second in _chunks(a, b):
        add = _gaps_on_cpu if a.device.type == "cpu" else gaps_by_torch
        total += sum_of_bins(add(first, second))
    return total


def value_sum(values: Tensor) -> ExactSum:
    """Return the sum of a flat FP32 or FP64 tensor."""
    total = ExactSum()
    for (part,) in _chunks(values):
        add = _values_on_cpu if part.device.type == "cpu" else values_by_torch
        total += sum_of_bins(add(part))
    return total


def merged_gap_sum(a: Tensor, b: Tensor, surplus: int) -> ExactSum:
    """Return what a range of the number line adds to the sum of |x - y| over two samples, by rank.

    `a` and `b` are their values there, flat, sorted and finite, and `surplus` is how many more
    values a's sample has below. The sum over all ranges is the whole.
    """
    if surplus < 0:
        a, b, surplus = b, a, -surplus
    # b's first values have their partners below; what is left of either side at the end, above
    paired = max(0, min(a.numel(), b.numel() - surplus))
    total = gap_sum(a[:paired], b[surplus : surplus + paired]) + value_sum(b[:surplus])
    for beyond in (value_sum(a[paired:]), value_sum(b[surplus + paired :])):
        total += ExactSum(-beyond.units, -beyond.special)
    return total


def empty_bins() -> NDArray[np.int64]:
    """Return the bins of no terms, (2, 2049), as the compiled loops take them."""
    return np.zeros((2, _BINS), np.int64)


def new_bins(device: torch.device) -> Tensor:
    """Return the bins of no terms, (2, 2049)."""
    return torch.zeros(2, _BINS, dtype=torch.int64, device=device)


def add_squares_(bins: Tensor, values: Tensor) -> None:
    """Add the square of each value of a flat FP32 or FP64 tensor to `bins`, on its device.

    Their halves have room for 2^31 values of many tensors: `carry_` makes room again.
    """
    for (part,) in _chunks(values):
        add = _SQUARES.get(part.device.type, squares_by_torch)
        add(part, bins)
        if values.numel() >= _CHUNK:
            carry_(bins)


def carry_(bins: Tensor) -> Tensor:
    """Move what low halves hold above 32 bits to the high ones, in place, and return `bins`.

    They may then be added to those of 2^31 others.
    """
    low, high = bins[0, :_SPECIAL], bins[1, :_SPECIAL]
    high += low >> _HALF
    low &= (1 << _HALF) - 1
    return bins


def weighted_sum(values: NDArray[np.float64], weights: NDArray[np.int64]) -> ExactSum:
    """Return the sum of integers times finite values of at most 11 bits, as FP16 and BF16 have."""
    mantissas, powers = np.frexp(values)
    sums = np.zeros(2 * _UNIT, np.int64)
    np.add.at(sums, powers + _UNIT, (mantissas * 2**11).astype(np.int64) * weights)
    units = 0
    for power in np.flatnonzero(sums).tolist():
        shift = power - 11
        units += int(sums[power]) << shift if shift >= 0 else int(sums[power]) >> -shift
    return ExactSum(units)


Added = tuple[NDArray[np.int64], int, float]
"""Bins of each term, (terms, 2, bins); how many signs flip; the largest difference."""


def sum_of_bins(bins: NDArray[np.int64]) -> ExactSum:
    """Return the sum that bins, (2, 2049), hold."""
    low, high = bins
    units = 0
    for power in np.flatnonzero(low[:_SPECIAL] | high[:_SPECIAL]).tolist():
        # subnormal numbers, of power 0, have the unit of those of power 1
        units += ((int(high[power]) << _HALF) + int(low[power])) << max(power - 1, 0)
    infinite, negative, nan = bool(low[_SPECIAL]), bool(high[_SPECIAL]), bool(low[_NAN])
    special = (math.inf if infinite else 0.0) - (math.inf if negative else 0.0)
    return ExactSum(units, math.nan if nan else special)


def _chunks(*tensors: Tensor) -> Iterable[tuple[Tensor, ...]]:
    """Return flat tensors cut alike into parts whose bins can't overflow, without gradients."""
    return zip(*(x.detach().contiguous().split(_CHUNK) for x in tensors), strict=True)


# What the loops are compiled by is imported where they run: numba takes a second, and a GPU's
# process never needs it.
def _add_on_cpu(a: Tensor, b: Tensor) -> Added:
    from stability.metrics.exact_loop import add_pairs  # heavy: numba

    bins = np.zeros((len(_TERMS), 2, _BINS), np.int64)
    flips, largest = add_pairs(a.numpy(), b.numpy(), bins)
    return bins, int(flips), float(largest)


def _gaps_on_cpu(a: Tensor, b: Tensor) -> NDArray[np.int64]:
    from stability.metrics.exact_loop import add_gaps  # heavy: numba

    bins = empty_bins()
    add_gaps(a.numpy(), b.numpy(), bins)
    return bins


def _values_on_cpu(values: Tensor) -> NDArray[np.int64]:
    from stability.metrics.exact_loop import add_values  # heavy: numba

    bins = empty_bins()
    add_values(values.numpy(), bins)
    return bins


def _squares_on_cpu(values: Tensor, bins: Tensor) -> None:
    from stability.metrics.exact_loop import add_squares  # heavy: numba

    add_squares(values.numpy(), bins.numpy())


def values_by_torch(values: Tensor) -> NDArray[np.int64]:
    """Return what `_values_on_cpu` does, by torch's operators."""
    bins = torch.zeros(2, _BINS, dtype=torch.int64, device=values.device)
    for part in values.split(_BATCH):
        _put(part.double(), bins)
    return bins.cpu().numpy()


def _squares_on_gpu(values: Tensor, bins: Tensor) -> None:
    terms = None
    if values.dtype == torch.float32 and values.numel():
        from stability.metrics.square_kernel import square_terms  # heavy: triton

        terms = square_terms(values)
    if terms is None:
        squares_by_torch(values, bins)
    else:
        _put(terms, bins)


def squares_by_torch(values: Tensor, bins: Tensor) -> None:
    """Do what `_squares_on_cpu` does, by torch's operators, on the values' device."""
    for part in values.split(_BATCH):
        value = part.double()
        square = value * value
        _put(square, bins)
        if values.dtype == torch.float64:
            _put(_rounded_off(value, square), bins)


_SQUARES = {"cpu": _squares_on_cpu, "cuda": _squares_on_gpu}


def gaps_by_torch(a: Tensor, b: Tensor) -> NDArray[np.int64]:
    """Return what `_gaps_on_cpu` does, by torch's operators."""
    bins = torch.zeros(2, _BINS, dtype=torch.int64, device=a.device)
    for first, second in zip(a.split(_BATCH), b.split(_BATCH), strict=True):
        x, y = first.double(), second.double()
        differ = x != y
        x, y = x[differ], y[differ]
        is_above = x > y
        _put(torch.where(is_above, x, -x), bins)
        _put(torch.where(is_above, -y, y), bins)
    return bins.cpu().numpy()


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
