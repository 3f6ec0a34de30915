"""Dropout's stream written anew in NumPy: which weights a seed keeps, word by word."""

import numpy as np
import torch

__all__ = ["keep_by_hand", "words_by_hand"]

_DROPOUT = 40
"""The stream's number; those of stochastic rounding are below."""


def _hash(x):
    """ "lowbias32" of uint32, whose products wrap around."""
    x = np.asarray(x, dtype=np.uint32)
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x7FEB352D)
        x = (x ^ (x >> np.uint32(15))) * np.uint32(0x846CA68B)
    return x ^ (x >> np.uint32(16))


def words_by_hand(sizes, seed, offset=0):
    """The 32 random bits of each weight, uint32 of shape `sizes` = (batch, heads, rows, keys)."""
    low = 0xFFFFFFFF
    word = _hash((seed & low) ^ 0x9E3779B9)
    for part in (_DROPOUT, seed >> 32, offset & low, offset >> 32):
        word = _hash(word ^ _hash(part))
    for axis, size in enumerate(sizes):
        place = np.arange(size).reshape([-1] + [1] * (3 - axis))
        word = _hash(word ^ _hash(place))
    return word


def keep_by_hand(sizes, p, seed, offset=0):
    """A bool tensor: a weight is kept unless its word is one of the p 2**32 smallest."""
    return torch.from_numpy(
        words_by_hand(sizes, seed, offset).astype(np.float64) >= round(p * 2**32)
    )
