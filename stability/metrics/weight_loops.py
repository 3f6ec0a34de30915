"""The loops of `weight_hash` and `weight_sketch` over values on a CPU, compiled by numba.

Their bits are those of torch's operators there. Numba keeps what it has compiled in `__pycache__`,
or in the user's cache where that can't be written.
"""

from typing import Any

import numpy as np
from numba import njit

__all__ = ["add_hashes", "add_to_sketch"]

Array = np.ndarray[Any, Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_ONE = np.uint64(1)
_6, _7, _9, _16 = np.uint64(6), np.uint64(7), np.uint64(9), np.uint64(16)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_32, _48, _63 = np.uint64(32), np.uint64(48), np.uint64(63)
_16_BITS = np.uint64(2**16 - 1)
_32_BITS = np.int64(2**32 - 1)


@njit(inline="always")
def _mixed(word: np.uint64) -> np.uint64:
    """Return what `mixing.mixed` does."""
    word = (word ^ (word >> _30)) * _FIRST
    word = (word ^ (word >> _27)) * _SECOND
    return word ^ (word >> _31)


@njit(nogil=True, cache=True)
def add_hashes(bits: Array, start: np.uint64, places: Array, key: np.uint64, lanes: Array) -> None:
    """Add the two hashes of each value to `lanes`, (2,) of uint64.

    `bits` are unsigned integers, `start`, `places` and `key` uint64: where `places` is empty, they
    go up from `start`.
    """
    first, second = np.uint64(0), np.uint64(0)
    has_places = places.size > 0
    place = start
    for i in range(bits.size):
        if has_places:
            place = places[i]
        word = _mixed(_mixed(key + place * _GOLDEN) ^ np.uint64(bits[i]))
        first += word
        second += _mixed(word ^ key)
        place += _ONE
    lanes[0] += first
    lanes[1] += second


@njit(inline="always")
def _bucket(place: np.uint64, turned: np.uint64) -> np.uint64:
    """Return the bucket of a place, as `weight_sketch.buckets_of` does."""
    x = (place ^ turned) & _16_BITS
    x = (x * ((turned >> _16) | _ONE)) & _16_BITS
    x = x ^ (x >> _7)
    x = (x * ((turned >> _32) | _ONE)) & _16_BITS
    x = x ^ (x >> _9)
    return (x + (turned >> _48)) & _16_BITS


@njit(nogil=True, cache=True)
def add_to_sketch(
    values: Array, start: np.uint64, places: Array, keys: Array, digits: Array
) -> int:
    """Add each value, in its digits, to its bucket of `digits`, (3, 65536) of int64.

    `values` are FP32 or FP64, `keys` those of signs and of blocks, uint64 (2,); the rest is as in
    `add_hashes`. Returns how many values have no digits and are left out: NaN, and from 2^31 on.
    """
    outside = 0
    has_places = places.size > 0
    place = start
    signs_of = block_of = ~np.uint64(0)
    signs = turned = np.uint64(0)
    for i in range(values.size):
        if has_places:
            place = places[i]
        if place >> _6 != signs_of:
            signs_of = place >> _6
            signs = _mixed(keys[0] + signs_of * _GOLDEN)
        if place >> _16 != block_of:
            block_of = place >> _16
            turned = _mixed(keys[1] + block_of * _GOLDEN)
        bucket = _bucket(place, turned)
        is_turned = ((signs >> (place & _63)) & _ONE) == _ONE
        place += _ONE
        value = np.float64(values[i])
        size = abs(value) * 4294967296.0
        # a NaN is not below it either
        if not size < 9223372036854775808.0:
            outside += 1
            continue
        whole = np.int64(size)
        # exact: the integer part takes no more than the number's own bits
        low = np.int64(np.rint((size - np.float64(whole)) * 4294967296.0))
        middle, high = whole & _32_BITS, whole >> np.int64(32)
        # times a sign: a branch that goes either way at random takes longer than all the rest
        sign = np.int64(1) - np.int64(2) * np.int64((value < 0) != is_turned)
        digits[0, bucket] += sign * low
        digits[1, bucket] += sign * middle
        if high:
            digits[2, bucket] += sign * high
    return outside
