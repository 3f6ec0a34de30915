"""A stream of tokens as blocks of fixed length, and which of them make up each batch.

Leaves out where tokens come from and how batches reach the trainer (`datamodule`).
"""

import hashlib
from functools import lru_cache

import torch
from torch import Tensor

__all__ = ["batch_indices", "cut_blocks"]


def cut_blocks(tokens: Tensor, context: int) -> Tensor:
    """Return 1-D `tokens` as non-overlapping blocks `(n_blocks, context + 1)`, a view.

    A block holds `context` inputs and, one further, their targets. The rest that fills no block is
    left out.
    """
    length = context + 1
    n_blocks = tokens.numel() // length
    return tokens[: n_blocks * length].view(n_blocks, length)


def batch_indices(order_seed: int, step: int, batch_size: int, n_blocks: int) -> Tensor:
    """Return the block numbers `(batch_size,)`, int64, of batch `step`, counted from 0.

    Blocks are visited epoch after epoch, each epoch in an order of its own; a batch may begin in
    one epoch and end in the next, so none is left out. A pure function of its arguments. ValueError
    if there is no block.
    """
    if n_blocks < 1:
        raise ValueError(f"batch_indices: n_blocks must be >= 1, got {n_blocks}; use more text")
    positions = torch.arange(step * batch_size, (step + 1) * batch_size)
    epochs = positions // n_blocks
    return torch.cat(
        [
            _permutation(order_seed, epoch, n_blocks)[positions[epochs == epoch] % n_blocks]
            for epoch in epochs.unique().tolist()
        ]
    )


@lru_cache(maxsize=4)
def _permutation(order_seed: int, epoch: int, n_blocks: int) -> Tensor:
    digest = hashlib.sha256(f"{order_seed}/{epoch}".encode()).digest()
    seed = int.from_bytes(digest[:8], "little", signed=True)
    return torch.randperm(n_blocks, generator=torch.Generator().manual_seed(seed))
