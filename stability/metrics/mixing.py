"""The mixer of 64 bits that gives each weight of a model its own random bits, by torch's operators.

It is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014): each bit of what goes in turns each
bit of what comes out with a probability near one half, and no two numbers come out the same. A
counter goes in, so the bits depend on nothing but a key and a place, and never on an order. Leaves
out numba's version of it (`weight_loops`), which gives the same bits.
"""

import hashlib

from torch import Tensor

__all__ = ["GOLDEN", "key_of", "mixed", "signed64"]

GOLDEN = 0x9E3779B97F4A7C15
"""The step of the counter: 2^64 over the golden ratio, odd."""


def mixed(words: Tensor) -> Tensor:
    """Return the mix of each word, int64 in and out.

    int64 wraps around in torch as unsigned numbers do; only its right shift differs, which fills in
    the sign, so the bits that come from above are masked.
    """
    words = (words ^ _shifted(words, 30)) * signed64(0xBF58476D1CE4E5B9)
    words = (words ^ _shifted(words, 27)) * signed64(0x94D049BB133111EB)
    return words ^ _shifted(words, 31)


def signed64(word: int) -> int:
    """Return the same 64 bits as a signed number, which torch takes."""
    return word - (1 << 64) if word >> 63 else word


def key_of(*parts: object) -> int:
    """Return 64 bits for what is written in `parts`: a name, a dtype, a shape."""
    text = "\0".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "little")


def _shifted(words: Tensor, bits: int) -> Tensor:
    return (words >> bits) & ((1 << (64 - bits)) - 1)
