"""The loops of `exact_sums` over values on a CPU, compiled by numba.

Their numbers are those of torch's operators there, to the bit. Numba keeps what it has compiled in
`__pycache__`, or in the user's cache where that can't be written.
"""

from typing import Any

import numpy as np
from numba import njit

__all__ = ["add_gaps", "add_merged", "add_pairs"]

Array = np.ndarray[Any, Any]

_INTEGER = (1 << 52) - 1
_HIDDEN = 1 << 52
_LOW = (1 << 32) - 1
_SPECIAL = 2047
_NAN = 2048
_SPLIT = 134217729.0
"""2^27 + 1: divides the 53 bits of an FP64 number into two halves (Dekker, 1971)."""
_LEAST, _MOST = 1e-140, 1e140


@njit(inline="always")
def _put(term: float, bins: Array) -> None:
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


@njit(nogil=True, cache=True)
def add_pairs(a: Array, b: Array, bins: Array) -> tuple[int, float]:
    """Add the terms of each pair of `a` and `b` to `bins`, (5, 2, 2049) of int64.

    Returns how many pairs differ in sign, and the largest |a - b|, NaN if one is no number.
    """
    flips, largest = 0, 0.0
    for i in range(a.size):
        x, y = np.float64(a[i]), np.float64(b[i])
        error = x - y
        size = abs(error)
        if not size <= largest and largest == largest:
            largest = size
        if (x > 0 and y < 0) or (x < 0 and y > 0):
            flips += 1
        square = y * y
        _put(y, bins[0])
        _put(size, bins[1])
        _put(x * x, bins[2])
        _put(square, bins[3])
        if a.itemsize == 8 and _LEAST < abs(y) < _MOST:
            # what the square has rounded off
            high = y * _SPLIT
            high -= high - y
            low = y - high
            _put(((high * high - square) + 2.0 * high * low) + low * low, bins[3])
        _put(error * error, bins[4])
    return flips, largest


@njit(nogil=True, cache=True)
def add_gaps(a: Array, b: Array, bins: Array) -> None:
    """Add |x - y| of each pair to `bins`, (2, 2049): x and y, one of them with its sign turned."""
    for i in range(a.size):
        x, y = np.float64(a[i]), np.float64(b[i])
        if x > y:
            _put(x, bins)
            _put(-y, bins)
        elif x != y:  # a NaN, too
            _put(y, bins)
            _put(-x, bins)


@njit(nogil=True, cache=True)
def add_merged(a: Array, b: Array, surplus: int, bins: Array) -> None:
    """Add to `bins` what two sorted arrays of finite values add to the sum of |x - y| by rank.

    `surplus` is how many more values than b's side a's has had below. The sum is the integral of
    |surplus| over the line: at each value the surplus goes up or down by one, and the integral has
    that value once more, or once less.
    """
    i = j = 0
    while i < a.size or j < b.size:
        if j == b.size or (i < a.size and a[i] <= b[j]):
            value = np.float64(a[i])
            _put(-value if surplus >= 0 else value, bins)
            surplus += 1
            i += 1
        else:
            value = np.float64(b[j])
            _put(value if surplus > 0 else -value, bins)
            surplus -= 1
            j += 1
