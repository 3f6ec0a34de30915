"""Hashes a text's token ids: equal hashes prove that two runs have the same text.

The hash of the batches that a run is trained on is the recorder's (`recorder.inside.batch_hash`).
"""

import hashlib

import torch
from torch import Tensor

__all__ = ["hash_tokens"]


def hash_tokens(tokens: Tensor) -> str:
    """Return the SHA-256, in hex, of the shape and the values of integer `tokens`.

    The dtype, the memory layout and the device do not change it.
    """
    # the shape is hashed too: one stream of tokens cut into other blocks is other data
    values = tokens.detach().to("cpu", torch.int64).contiguous()
    digest = hashlib.sha256(repr(tuple(values.shape)).encode())
    digest.update(values.numpy().data)
    return digest.hexdigest()
