"""Random bits as a pure function of a seed and coordinates: what stochastic rounding draws from.

This is a counter-based generator. It has no state, so any tile of any engine can draw the bits of
an element from where the element lies, and a rerun draws the same. torch's generators would give
other bits whenever a tile's size or the order of tiles changed, and the two engines could never
agree.

`_mix` is the 32-bit finaliser "lowbias32", found by a search (nullprogram.com, "Prospecting for
Hash Functions", 2018). `triton.rounding.random_bits` is the same function on blocks of uint32. Here
words are mixed as int32, since few operations of torch take unsigned integers: products wrap alike,
and what a shift to the right copies of the sign is masked. In int64 it takes twice as long. Leaves
out what the bits are used for (`rounding`, `dropout`) and the number of each stream (`points`).
"""

from typing import overload

import torch
from torch import Tensor

__all__ = ["bits_after", "bits_at", "folded", "hashed", "word_at", "words_after"]

_WORD = 0xFFFFFFFF
_NOT_ZERO = 0x9E3779B9  # 2**32 / golden ratio; `_mix` leaves 0 where it is


def bits_at(seed: int, *coordinates: int | Tensor) -> Tensor:
    """Return 32 random bits for each place, int64, in the shape that the coordinates broadcast to.

    Coordinates are integers below 2**32 or int64 tensors of them; at least one is a tensor. Their
    order matters: each is folded into the hash of those before it.
    """
    return bits_after(word_at(seed), *coordinates)


def word_at(seed: int, *coordinates: int) -> int:
    """Return the hash of a seed and integers below 2**32, an integer below 2**32."""
    return words_after(_mix((seed & _WORD) ^ _NOT_ZERO), *coordinates)


def bits_after(word: int, *coordinates: int | Tensor) -> Tensor:
    """Return `bits_at` with further coordinates, given `word_at` of the first ones."""
    mixed = words_after(word, *coordinates)
    assert isinstance(mixed, Tensor)
    return mixed.to(torch.int64).bitwise_and_(_WORD)


@overload
def words_after(word: int, *coordinates: int) -> int: ...


@overload
def words_after(word: int | Tensor, *coordinates: int | Tensor) -> int | Tensor: ...


def words_after(word: int | Tensor, *coordinates: int | Tensor) -> int | Tensor:
    """Return the bits of `bits_after` in an int32 tensor, or of integers alone in an integer.

    `word` is `word_at` of the first coordinates, or what this function returned for them.
    """
    for coordinate in coordinates:
        word = folded(word, hashed(coordinate))
    return word


def hashed(coordinate: int | Tensor) -> int | Tensor:
    """Return what `folded` takes of a coordinate.

    Were it folded in as it is, two rows whose hashes differ in their last bits alone would draw the
    same bits in other columns.
    """
    return _mix(coordinate.to(torch.int32) if isinstance(coordinate, Tensor) else coordinate)


def folded(word: int | Tensor, hash: int | Tensor) -> int | Tensor:
    """Return the word with one more coordinate, given by its hash, folded in."""
    if isinstance(word, Tensor) or isinstance(hash, Tensor):
        word, hash = (x if isinstance(x, Tensor) else _signed(x) for x in (word, hash))
    return _mix(word ^ hash)


def _signed(x: int) -> int:
    """Return the int32 that has the bits of an integer below 2**32."""
    return x - 2**32 if x >= 2**31 else x


@overload
def _mix(x: int) -> int: ...


@overload
def _mix(x: int | Tensor) -> int | Tensor: ...


def _mix(x: int | Tensor) -> int | Tensor:
    if isinstance(x, Tensor):
        x = _shifted_onto(x, 16).mul_(0x7FEB352D)
        x = _shifted_onto(x, 15).mul_(_signed(0x846CA68B))
        return _shifted_onto(x, 16)
    x ^= x >> 16
    x = x * 0x7FEB352D & _WORD
    x ^= x >> 15
    x = x * 0x846CA68B & _WORD
    return x ^ x >> 16


def _shifted_onto(x: Tensor, shift: int) -> Tensor:
    """Return x ^ (x >> shift) of int32 words, as if they had no sign."""
    return (x >> shift).bitwise_and_((1 << (32 - shift)) - 1).bitwise_xor_(x)
