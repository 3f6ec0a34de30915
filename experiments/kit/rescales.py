"""How often flash attention rescales: the times a row's running maximum moves.

Each time a key block holds a score larger than all before it, the recurrence multiplies running sum
and accumulator by exp(old max - new max). For keys in no particular order block j holds the largest
score so far with probability 1/j, so a row rescales H - 1 times on average, H = 1 + 1/2 + ... + 1/n
over n blocks. Leaves out masks, and the rounding of scores, which makes a few of the moves ties.

Shape suffixes: B batch, H query heads, Q query_len, J keys of a key block.
"""

import torch
from torch import Tensor

__all__ = ["rescales"]


def rescales(q: Tensor, k: Tensor, *, block_k: int) -> Tensor:
    """Return how often each row's running maximum grows after its first key block.

    q is `(batch, heads, query_len, head_dim)`, k has kv_heads; the answer is int64
    `(batch, heads, query_len)`. Blocks of `block_k` keys are read forward, and no key is masked.
    Scores are formed in FP32 (FP64 for FP64 inputs), one block at a time. ValueError for a block of
    no keys, or heads that kv_heads does not divide.
    """
    if block_k < 1:
        raise ValueError(f"rescales: block_k must be at least 1, got {block_k}; 64 is usual")
    if q.shape[1] % k.shape[1]:
        raise ValueError(
            f"rescales: heads must be a multiple of kv_heads, got {q.shape[1]} and {k.shape[1]}; "
            "give q and k of one call"
        )
    work = torch.promote_types(q.dtype, torch.float32)
    q_BHQD = q.detach().to(work)
    k_BHKD = k.detach().to(work).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    first_BHJD, *others = k_BHKD.split(block_k, dim=2)
    largest_BHQ = (q_BHQD @ first_BHJD.mT).amax(dim=-1)
    moves_BHQ = torch.zeros_like(largest_BHQ, dtype=torch.int64)
    for k_BHJD in others:
        block_BHQ = (q_BHQD @ k_BHJD.mT).amax(dim=-1)
        moves_BHQ += block_BHQ > largest_BHQ
        largest_BHQ = torch.maximum(largest_BHQ, block_BHQ)
    return moves_BHQ
