"""The mixer of 64 bits by which samples are hashed and weights are nudged, by torch's operators.

It is the finalizer of SplitMix64: each bit of what goes in moves about half of those that come out.
Gives the bits that `metrics.mixing` does, which can't be imported where a user's script runs.
"""

from __future__ import annotations

import hashlib

from torch import Tensor

__all__ = ["FIRST", "GOLDEN", "key_of", "mixed", "signed64"]


def signed64(number: int) -> int:
    """Return what is left of a number in 64 bits, as torch's integers wrap around."""
    return (number + 2**63) % 2**64 - 2**63


GOLDEN = signed64(0x9E3779B97F4A7C15)
"""The step of the counter: 2^64 over the golden ratio, odd."""
FIRST = signed64(0xBF58476D1CE4E5B9)
_SECOND = signed64(0x94D049BB133111EB)


def mixed(words: Tensor) -> Tensor:
    """Return the mix of each word, int64 in and out."""
    words = (words ^ _shifted(words, 30)) * FIRST
    words = (words ^ _shifted(words, 27)) * _SECOND
    return words ^ _shifted(words, 31)


def key_of(*parts: object) -> int:
    """Return 64 bits for what is written in `parts`, as a signed number."""
    text = "\0".join(map(str, parts)).encode()
    return signed64(int.from_bytes(hashlib.sha256(text).digest()[:8], "little"))


def _shifted(words: Tensor, bits: int) -> Tensor:
    # torch shifts the sign in from the left; a mix that loses no bit needs zeros
    return (words >> bits) & ((1 << (64 - bits)) - 1)
