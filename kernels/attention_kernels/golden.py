"""The oracle: softmax attention in FP64, over chunks of queries, differentiated by autograd.

Written as softmax(scale q k^T) v and nothing more, so that it shares no derivation with the flash
recurrence it judges. Each chunk of queries is a checkpoint: its scores are recomputed in the
backward, and forward and backward never hold a query_len x key_len matrix. Leaves out speed,
formats and rounding: FP64 is all it knows.

Shape suffixes: B batch, H query heads, G kv heads, R query heads of one kv head (H = G R),
C query rows of a chunk, K keys that the chunk may see, D head_dim.
"""

from bisect import bisect_right

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_kernels.masks import Mask, Sequence

__all__ = ["attend"]

# Scores of one chunk; about five tensors of this size live at the backward's peak. Below 32 MiB
# glibc serves them from its heap, whose holes raised the causal peak at (1, 8, 8192, 128) from
# 1.2 to 3.8 GiB; above, it maps and unmaps each one.
CHUNK_BYTES = 48 * 2**20


def attend(q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float) -> Tensor:
    """Return attention in FP64, `(batch, heads, query_len, head_dim)`; arguments as in `api`."""
    q, k, v = q.double(), k.double(), v.double()
    parts, stop = [], 0
    for sequence in mask.sequences(q.shape[2], k.shape[2]):
        at_q, at_k = sequence.queries, sequence.keys
        parts.append(torch.zeros_like(q[:, :, stop : at_q.start]))
        parts += _attend_sequence(
            q[:, :, at_q.start : at_q.stop],
            k[:, :, at_k.start : at_k.stop],
            v[:, :, at_k.start : at_k.stop],
            sequence,
            scale,
        )
        stop = at_q.stop
    parts.append(torch.zeros_like(q[:, :, stop:]))
    return torch.cat(parts, dim=2)


def _attend_sequence(
    q: Tensor, k: Tensor, v: Tensor, sequence: Sequence, scale: float
) -> list[Tensor]:
    kv_heads, query_len, key_len = k.shape[1], q.shape[2], k.shape[2]
    q_BGRQD = q.unflatten(1, (kv_heads, -1))
    budget = CHUNK_BYTES // (8 * q.shape[0] * q.shape[1])
    chunks, start = [], 0
    while start < query_len:
        rows = range(start, start + _chunk_rows(budget, start, sequence))
        keys = sequence.mask.key_range(rows, query_len, key_len)
        chunk = _checkpointed(q_BGRQD, k, v, rows, keys, sequence, scale)
        chunks.append(chunk.flatten(1, 2))
        start = rows.stop
    return chunks


def _chunk_rows(budget: int, start: int, sequence: Sequence) -> int:
    """Return the most rows from `start` on whose scores fit `budget`; at least one."""
    query_len, key_len = len(sequence.queries), len(sequence.keys)

    def scores(rows: int) -> int:
        seen = sequence.mask.key_range(range(start, start + rows), query_len, key_len)
        return rows * len(seen)

    return max(1, bisect_right(range(1, query_len - start + 1), budget, key=scores))


def _checkpointed(
    q_BGRQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    rows: range,
    keys: range,
    sequence: Sequence,
    scale: float,
) -> Tensor:
    arguments = (q_BGRQD, k_BGKD, v_BGKD, rows, keys, sequence, scale)
    needs_grad = any(x.requires_grad for x in (q_BGRQD, k_BGKD, v_BGKD))
    if not (needs_grad and torch.is_grad_enabled()):
        return _attend_rows(*arguments)
    return checkpoint(_attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(
    q_BGRQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    rows: range,
    keys: range,
    sequence: Sequence,
    scale: float,
) -> Tensor:
    mask, lengths = sequence.mask, (len(sequence.queries), len(sequence.keys))
    k_BGKD, v_BGKD = (x[:, :, keys.start : keys.stop] for x in (k_BGKD, v_BGKD))
    q_BGRCD = q_BGRQD[..., rows.start : rows.stop, :]
    kv_heads = k_BGKD.shape[1]
    # Heads of a group are rows of one product, so that k and v are never repeated.
    q_BGMD = q_BGRCD.flatten(2, 3) * scale
    scores_BGRCK = (q_BGMD @ k_BGKD.mT).unflatten(2, (-1, len(rows)))
    if mask.softcap:
        scores_BGRCK = mask.softcap * torch.tanh(scores_BGRCK / mask.softcap)
    added = mask.added(rows, keys, *lengths, scores_BGRCK.dtype, scores_BGRCK.device)
    if added is not None:
        scores_BGRCK = scores_BGRCK + _grouped(added, kv_heads)
    hidden = mask.hidden(rows, keys, *lengths, scores_BGRCK.device)
    if hidden is not None:
        scores_BGRCK = scores_BGRCK.masked_fill(_grouped(hidden, kv_heads), -torch.inf)
    weights_BGRCK = _softmax(scores_BGRCK)
    return (weights_BGRCK.flatten(2, 3) @ v_BGKD).unflatten(2, (-1, len(rows)))


def _softmax(scores_BGRCK: Tensor) -> Tensor:
    """Return softmax(scores), zeros for rows that attend nothing."""
    if not scores_BGRCK.shape[-1]:
        return scores_BGRCK
    nothing_BGRC1 = scores_BGRCK.detach().amax(dim=-1, keepdim=True) == -torch.inf
    if not nothing_BGRC1.any():
        return torch.softmax(scores_BGRCK, dim=-1)
    # Such a row would have NaN for weights; its scores are set to any finite value first, so that
    # no NaN reaches the gradient.
    scores_BGRCK = scores_BGRCK.masked_fill(nothing_BGRC1, 0.0)
    return torch.softmax(scores_BGRCK, dim=-1).masked_fill(nothing_BGRC1, 0.0)


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Return a tile that broadcasts to (B, H, C, K) as one that broadcasts to (B, G, R, C, K)."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(1) if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))
