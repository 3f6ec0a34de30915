"""The loops of `exact_sums` over values on a CPU, compiled by numba.

Their numbers are those of torch's operators there, to the bit. FP32 values go in blocks: where the
largest and the least of a block are at most some 2^26 apart, all its terms are multiples of one
power of two, and a number M of that grain turns a term into an integer by one addition, t + M,
whose last bits it is. Such integers are added four or eight at a time, and each block once to the
bins. Other blocks, and FP64, go value by value. (M is the trick of pre-rounding: Demmel and Nguyen,
ARITH 2013.)

Numba keeps what it has compiled in `__pycache__`, or in the user's cache where that can't be
written. Leaves out which sums are taken (`exact_sums`).
"""

from typing import Any

import numpy as np
from numba import njit

__all__ = [
    "add_gaps",
    "add_merged",
    "add_pairs",
    "add_repeated",
    "add_squares",
    "add_values",
    "gather_runs",
]

Array = np.ndarray[Any, Any]

_INTEGER = (1 << 52) - 1
_HIDDEN = 1 << 52
_LOW = (1 << 32) - 1
_SPECIAL = 2047
_NAN = 2048
_SPLIT = 134217729.0
"""2^27 + 1: divides the 53 bits of an FP64 number into two halves (Dekker, 1971)."""
_LEAST, _MOST = 1e-140, 1e140
_BLOCK = 2048
"""Values at once: 8 kB of FP32. Integers of 52 bits of so many add up within 63."""
_WIDTH = 50
"""Bits from a block's largest value down to the grain of its least that one M has room for."""
_FP64 = 1075
"""The bin of a power of two is that power plus so many."""


@njit(inline="always")
def _put(term: Any, bins: Array) -> None:
    """Add the integer of `term` to the bin of its power, in two halves."""
    word = np.float64(term).view(np.int64)
    power = (word >> 52) & 0x7FF
    if power == _SPECIAL:
        if term != term:
            bins[0, _NAN] += 1
        elif term > 0:
            bins[0, _SPECIAL] += 1
        else:
            bins[1, _SPECIAL] += 1
        return
    integer = word & _INTEGER
    if power:
        integer |= _HIDDEN
    if word < 0:
        integer = -integer
    bins[0, power] += integer & _LOW
    bins[1, power] += integer >> 32


@njit(inline="always")
def _put_square(value: Any, bins: Array, is_wide: bool) -> None:
    """Add the square to the bins, and of an FP64 value what the square has rounded off."""
    square = value * value
    _put(square, bins)
    if is_wide and _LEAST < abs(value) < _MOST:
        high = value * _SPLIT
        high -= high - value
        low = value - high
        _put(((high * high - square) + 2.0 * high * low) + low * low, bins)


@njit(inline="always")
def _put_block(total: Any, count: int, magic: float, power: Any, bins: Array) -> None:
    """Add to the bins a block's sum of integers, in units of 2^power, on top of `count` M's."""
    # what has wrapped around in 64 bits wraps back: the sum itself has fewer
    total -= count * np.float64(magic).view(np.int64)
    bins[0, power + _FP64] += total & _LOW
    bins[1, power + _FP64] += total >> 32


@njit(nogil=True, cache=True)
def _block_powers(a: Array, b: Array) -> tuple[Any, Any]:
    """Return n and m: all |values| of both FP32 blocks are below 2^n, and multiples of 2^m.

    n is 129 where a value is not finite.
    """
    one, size = np.uint32(1), np.uint32(0x7FFFFFFF)
    most, least = np.uint32(0), np.uint32(0xFFFFFFFF)
    first, second = a.view(np.uint32), b.view(np.uint32)
    for i in range(first.size):
        x, y = first[i] & size, second[i] & size
        most = max(most, max(x, y))
        # less one: 0 has no grain, and becomes the largest
        least = min(least, min(np.uint32(x - one), np.uint32(y - one)))
    if most == 0:
        return 0, 0
    lowest = (np.int64(least) + 1) >> 23
    return (np.int64(most) >> 23) - 126, max(lowest, 1) - 150


@njit(nogil=True, cache=True, fastmath={"nnan", "ninf", "nsz"})
def _largest_gap(a: Array, b: Array) -> Any:
    largest = 0.0
    for i in range(a.size):
        largest = max(largest, abs(np.float64(a[i]) - np.float64(b[i])))
    return largest


@njit(nogil=True, cache=True)
def _add_block(a: Array, b: Array, top: Any, bins: Array) -> Any:
    """Add the terms of two FP32 blocks of values below 2^top; return how many signs differ."""
    grain = 1.5 * 2.0 ** (top - _WIDTH + 52)
    coarse = 1.5 * 2.0 ** (2 * top - _WIDTH + 1 + 52)
    fine = coarse * 2.0**-52
    values = sizes = a_coarse = a_fine = b_coarse = b_fine = coarse_error = fine_error = 0
    flips = 0
    for i in range(a.size):
        x, y = np.float64(a[i]), np.float64(b[i])
        error = x - y
        flips += np.int64(x * y < 0)
        values += np.float64(y + grain).view(np.int64)
        sizes += np.float64(abs(error) + grain).view(np.int64)
        square = x * x
        rounded = square + coarse
        a_coarse += np.float64(rounded).view(np.int64)
        a_fine += np.float64((square - (rounded - coarse)) + fine).view(np.int64)
        square = y * y
        rounded = square + coarse
        b_coarse += np.float64(rounded).view(np.int64)
        b_fine += np.float64((square - (rounded - coarse)) + fine).view(np.int64)
        square = error * error
        rounded = square + coarse
        coarse_error += np.float64(rounded).view(np.int64)
        fine_error += np.float64((square - (rounded - coarse)) + fine).view(np.int64)
    linear, square_power = top - _WIDTH, 2 * top - _WIDTH + 1
    _put_block(values, a.size, grain, linear, bins[0])
    _put_block(sizes, a.size, grain, linear, bins[1])
    _put_block(a_coarse, a.size, coarse, square_power, bins[2])
    _put_block(a_fine, a.size, fine, square_power - 52, bins[2])
    _put_block(b_coarse, a.size, coarse, square_power, bins[3])
    _put_block(b_fine, a.size, fine, square_power - 52, bins[3])
    _put_block(coarse_error, a.size, coarse, square_power, bins[4])
    _put_block(fine_error, a.size, fine, square_power - 52, bins[4])
    return flips


@njit(nogil=True, cache=True)
def _add_each_pair(a: Array, b: Array, largest: Any, bins: Array) -> tuple[Any, Any]:
    flips, is_wide = 0, a.itemsize == 8
    for i in range(a.size):
        x, y = np.float64(a[i]), np.float64(b[i])
        error = x - y
        size = abs(error)
        if not size <= largest and largest == largest:
            largest = size
        if (x > 0 and y < 0) or (x < 0 and y > 0):
            flips += 1
        _put(y, bins[0])
        _put(size, bins[1])
        _put_square(x, bins[2], False)
        _put_square(y, bins[3], is_wide)
        _put_square(error, bins[4], False)
    return flips, largest


@njit(nogil=True, cache=True)
def add_pairs(a: Array, b: Array, bins: Array) -> tuple[Any, Any]:
    """Add the terms of each pair of `a` and `b` to `bins`, (5, 2, 2049) of int64.

    Returns how many pairs differ in sign, and the largest |a - b|, NaN if one is no number.
    """
    if a.itemsize == 8:
        return _add_each_pair(a, b, 0.0, bins)
    flips, largest = 0, 0.0
    for start in range(0, a.size, _BLOCK):
        x, y = a[start : start + _BLOCK], b[start : start + _BLOCK]
        top, grain = _block_powers(x, y)
        if top < 129 and top - grain <= _WIDTH:
            flips += _add_block(x, y, top, bins)
            size = _largest_gap(x, y)
            largest = size if size > largest else largest
        else:
            found, largest = _add_each_pair(x, y, largest, bins)
            flips += found
    return flips, largest


@njit(nogil=True, cache=True)
def add_gaps(a: Array, b: Array, bins: Array) -> None:
    """Add |x - y| of each pair to `bins`, (2, 2049): x and y, one of them with its sign turned."""
    for start in range(0, a.size, _BLOCK):
        first, second = a[start : start + _BLOCK], b[start : start + _BLOCK]
        if a.itemsize == 4:
            top, grain = _block_powers(first, second)
            if top < 129 and top - grain <= _WIDTH:
                magic, total = 1.5 * 2.0 ** (top - _WIDTH + 52), 0
                for i in range(first.size):
                    gap = abs(np.float64(first[i]) - np.float64(second[i]))
                    total += np.float64(gap + magic).view(np.int64)
                _put_block(total, first.size, magic, top - _WIDTH, bins)
                continue
        for i in range(first.size):
            x, y = np.float64(first[i]), np.float64(second[i])
            if x > y:
                _put(x, bins)
                _put(-y, bins)
            elif x != y:  # a NaN, too
                _put(y, bins)
                _put(-x, bins)


@njit(nogil=True, cache=True)
def add_values(values: Array, bins: Array) -> None:
    """Add each value to `bins`, (2, 2049)."""
    for value in values:
        _put(np.float64(value), bins)


@njit(nogil=True, cache=True)
def add_merged(a: Array, b: Array, surplus: int, bins: Array) -> None:
    """Add to `bins` what a range adds to the sum of |x - y| by rank: see `merged_gap_sum`."""
    if surplus < 0:
        a, b, surplus = b, a, -surplus
    paired = max(0, min(a.size, b.size - surplus))
    add_gaps(a[:paired], b[surplus : surplus + paired], bins)
    # b's first values have their partners below; what is left of either side at the end, above
    for value in b[:surplus]:
        _put(np.float64(value), bins)
    for value in a[paired:]:
        _put(-np.float64(value), bins)
    for value in b[surplus + paired :]:
        _put(-np.float64(value), bins)


@njit(nogil=True, cache=True)
def add_repeated(value: float, times: int, bins: Array) -> None:
    """Add a value so many times to `bins`, or take it off so many where `times` is below 0."""
    for _ in range(abs(times)):
        _put(value if times > 0 else -value, bins)


@njit(nogil=True, cache=True)
def gather_runs(a: Array, b: Array, cuts: Array, into_a: Array, into_b: Array) -> None:
    """Copy what lies from `cuts[side, 0, i]` to before `cuts[side, 1, i]`, of all i, together."""
    filled = 0
    for run in range(cuts.shape[2]):
        for at in range(cuts[0, 0, run], cuts[0, 1, run]):
            into_a[filled] = a[at]
            filled += 1
    filled = 0
    for run in range(cuts.shape[2]):
        for at in range(cuts[1, 0, run], cuts[1, 1, run]):
            into_b[filled] = b[at]
            filled += 1


@njit(nogil=True, cache=True)
def add_squares(values: Array, bins: Array) -> None:
    """Add the square of each value to `bins`, (2, 2049)."""
    for start in range(0, values.size, _BLOCK):
        block = values[start : start + _BLOCK]
        if values.itemsize == 4:
            top, grain = _block_powers(block, block)
            if top < 129 and top - grain <= _WIDTH:
                power = 2 * top - _WIDTH + 1
                coarse = 1.5 * 2.0 ** (power + 52)
                fine, upper, lower = coarse * 2.0**-52, 0, 0
                for i in range(block.size):
                    value = np.float64(block[i])
                    square = value * value
                    rounded = square + coarse
                    upper += np.float64(rounded).view(np.int64)
                    lower += np.float64((square - (rounded - coarse)) + fine).view(np.int64)
                _put_block(upper, block.size, coarse, power, bins)
                _put_block(lower, block.size, fine, power - 52, bins)
                continue
        for i in range(block.size):
            _put_square(np.float64(block[i]), bins, values.itemsize == 8)
