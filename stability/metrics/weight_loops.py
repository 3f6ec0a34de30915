"""The loops of `weight_hash` and `weight_sketch` over values on a CPU, compiled by numba.

Their bits are those of torch's operators there. Numba keeps what it has compiled in `__pycache__`,
or in the user's cache where that can't be written.
"""

from typing import Any

import numpy as np
from numba import njit

__all__ = ["add_hashes"]

Array = np.ndarray[Any, Any]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)
_ONE = np.uint64(1)


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
