"""Attention dropout: which weights are kept, as a pure function of a seed and of where they lie.

After the softmax a weight P is multiplied by keep / (1 - p), where keep is 1 with probability
1 - p and else 0 (arXiv 1706.03762, section 5.4, as flash-attn has it): the denominators, and with
them the LSE, know of no dropout, and the backward draws the same keep again:

    out = (P keep / (1 - p)) v,  dv = (P keep / (1 - p))^T dO
    dP = keep / (1 - p) (dO v^T),  dS = P (dP - delta),  delta = rowsum(dO * O)

keep is decided by 32 random bits, a hash of (seed, offset, batch, query head, query, key) and of
nothing else (`random_bits`; the stream is dropout's own). A query or key is counted within its
sequence, and a packed sequence's batch is its number, so that packed and padded sequences drop
alike, and so do all engines, dtypes, tiles and splits. A weight is dropped where the bits are below
round(p 2**32), so p is kept to 2**-33. The factor 1 / (1 - p) is that of the p that was given, an
FP64 number that each engine multiplies with in its work format.

The hash carries 32 bits from one coordinate to the next, so two rows share all their keep with
probability 2**-32: of half a million rows some 30 pairs. Leaves out where each engine multiplies
(`masks.Mask.kept` is what they read).

Shape suffixes: B batch, H query heads, I some query rows, J some keys.
"""

import torch
from torch import Tensor

from attention_kernels.points import DROPOUT_STREAM
from attention_kernels.random_bits import bits_after, word_at

__all__ = ["MAX_DROPOUT", "MAX_SEED", "dropped_below", "keep_tile", "keep_word", "scale_of_kept"]

_WORDS = 2**32
MAX_DROPOUT = 1 - 1 / _WORDS
"""The largest p: beyond it no word of 32 bits would keep a weight."""
MAX_SEED = 2**63 - 1
"""The largest seed, and the largest offset: what an operator of torch takes for an integer."""


def dropped_below(p: float) -> int:
    """Return below which of the 2**32 words a weight is dropped: p of them."""
    return round(p * _WORDS)


def scale_of_kept(p: float) -> float:
    """Return what kept weights are multiplied with; 1 without dropout."""
    return 1.0 / (1.0 - p)


def keep_word(seed: int, offset: int) -> int:
    """Return the word of a call, into which the place of a weight is folded."""
    low = _WORDS - 1
    return word_at(seed & low, DROPOUT_STREAM, seed >> 32, offset & low, offset >> 32)


def keep_tile(
    p: float,
    word: int,
    batches: range,
    heads: range,
    rows: range,
    keys: range,
    device: torch.device,
) -> Tensor:
    """Return a bool tile (B, H, I, J), true where the weight is kept."""
    batch_B, head_H, row_I, key_J = (
        torch.arange(x.start, x.stop, device=device) for x in (batches, heads, rows, keys)
    )
    places = batch_B[:, None, None, None], head_H[:, None, None], row_I[:, None], key_J
    return bits_after(word, *places) >= dropped_below(p)
