"""The loop of `sorting`: a radix sort of FP32 values by their bits, compiled by numba.

The bits of a float, those of a negative one turned around, are an integer that orders as the values
do. Only the digits in which such integers of one array differ are sorted by, the last digit first,
so values of a short range take fewer passes. (Knuth, The Art of Computer Programming 3, 5.2.5.)
"""

from typing import Any

import numpy as np
from numba import njit

__all__ = ["sort_by_digits"]

Array = np.ndarray[Any, Any]

_DIGIT = 11
"""Bits of a digit, at most: 2,048 places of a pass stay in the cache."""
_INFINITE = 0x7F800000


@njit(inline="always")
def _turned(word: Any) -> Any:
    """Return the integer in a value's order for its bits as int32, or its bits for the integer."""
    return word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF))


@njit(nogil=True, cache=True)
def _sort_digits(words: Array, room: Array, low: Any, width: int, places: Array) -> None:
    """Sort `words` by their integers above the least, `low`; `places` are 0, a row a digit."""
    source, target, least = words.view(np.uint32), room, np.uint32(low)
    last = np.uint32((1 << width) - 1)
    for i in range(words.size):
        key = np.uint32(np.uint32(_turned(words[i])) - least)
        source[i] = key
        for digit in range(places.shape[0]):
            places[digit, (key >> np.uint32(digit * width)) & last] += 1
    for digit in range(places.shape[0]):
        row, shift, total = places[digit], np.uint32(digit * width), 0
        for j in range(row.size):
            count = row[j]
            row[j] = total
            total += count
        for i in range(source.size):
            key = source[i]
            at = (key >> shift) & last
            target[row[at]] = key
            row[at] += 1
        source, target = target, source
    for i in range(words.size):
        words[i] = _turned(np.int32(np.uint32(source[i] + least)))


@njit(nogil=True, cache=True)
def sort_by_digits(words: Array, room: Array) -> bool:
    """Sort FP32 values, given as int32, in place; `room` is as many uint32.

    Return False, and leave them as they are, if one is NaN.
    """
    if words.size == 0:
        return True
    low, high = np.int32(0x7FFFFFFF), np.int32(-0x80000000)
    for word in words:
        key = _turned(word)
        low, high = min(low, key), max(high, key)
    # the integers of -inf and +inf; NaN lie beyond
    if np.int64(low) < -_INFINITE - 1 or np.int64(high) > _INFINITE:
        return False
    bits, span = 0, np.int64(high) - np.int64(low)
    while span >> bits:
        bits += 1
    passes = (bits + _DIGIT - 1) // _DIGIT
    width = (bits + passes - 1) // max(passes, 1)  # all digits of one width
    if passes:
        _sort_digits(words, room, low, width, np.zeros((passes, 1 << width), np.int64))
    return True
