"""Hashes token ids: all of a text at once, or a run's batches one after another.

Equal hashes prove that two runs saw the same data in the same order.
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["BatchFingerprint", "hash_tokens"]


def hash_tokens(tokens: Tensor) -> str:
    """Return the SHA-256, in hex, of the shape and the values of integer `tokens`.

    The dtype, the memory layout and the device do not change it.
    """
    # the shape is hashed too: one stream of tokens cut into other batches is other data
    values = tokens.detach().to("cpu", torch.int64).contiguous()
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    digest.update(values.numpy().data)
    return digest.hexdigest()


class BatchFingerprint:
    """A running hash h of all batches so far: h <- sha256(h || hash of the batch).

    Give an earlier `hexdigest` as `digest` to continue from there, as a resumed run does. The empty
    default starts anew, from the SHA-256 of no bytes.
    """

    def __init__(self, digest: str = "") -> None:
        self._digest = digest or hashlib.sha256().hexdigest()

    def update(self, tokens: Tensor) -> None:
        """Add the next batch of token ids, of any shape, to the hash."""
        chained = f"{self._digest}{hash_tokens(tokens)}"
        self._digest = hashlib.sha256(chained.encode()).hexdigest()

    def hexdigest(self) -> str:
        """Return the hash of the batches so far, 64 hexadecimal digits."""
        return self._digest
