"""Sorts flat arrays of values in place: by numpy, or by digits of their bits where that is faster.

Numpy sorts as fast as a CPU's vector instructions let it: 1e7 FP32 values took it 0.06 s on a Xeon
and 0.4 s on an AMD EPYC, both with AVX-512. There the digits (`sorting_loop`) took a third of that
or less. Which is faster here is timed once in a process. Both end in the same values, equal ones
can't be told apart but for the signs of zeros, and so no distance depends on the choice.
"""

import functools
import time
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

__all__ = ["sort_"]

_FEW, _MANY = 2**12, 2**20
"""Below the first, numpy is faster; beyond the second, what the digits need is too much memory."""


def sort_(values: NDArray[np.floating]) -> None:
    """Sort a flat array of FP32 or FP64 in place, ascending with NaN last; takes 4 MB at most."""
    is_fit = values.dtype == np.float32 and values.flags.c_contiguous
    if is_fit and _FEW <= values.size <= _MANY and _digits_are_faster() and _by_digits(values):
        return
    values.sort()


def _by_digits(values: NDArray[np.floating]) -> bool:
    """Sort FP32 values; return False, and leave them as they are, if one is NaN."""
    from stability.metrics.sorting_loop import sort_by_digits  # heavy: numba

    return sort_by_digits(values.view(np.int32), np.empty(values.size, np.uint32))


@functools.cache
def _digits_are_faster() -> bool:
    """Time both ways on 2^15 values, which takes some milliseconds."""
    values = np.random.default_rng(0).standard_normal(2**15, np.float32)
    _by_digits(values.copy())  # compiles it

    def seconds(sort: Callable[[NDArray[np.float32]], object]) -> float:
        taken = []
        for _ in range(3):
            copy = values.copy()
            begun = time.perf_counter()
            sort(copy)
            taken.append(time.perf_counter() - begun)
        return min(taken)

    return seconds(_by_digits) < seconds(lambda copy: copy.sort())
