"""The oracle: softmax attention in FP64, over chunks of queries, differentiated by autograd.

Written as softmax(scale q k^T) v and nothing more, so that it shares no derivation with the flash
recurrence it judges. Each chunk of queries is a checkpoint: its scores are recomputed in the
backward, and forward and backward never hold a query_len x key_len matrix. Leaves out speed,
formats and rounding: FP64 is all it knows.

Shape suffixes: B batch, H query heads, G kv heads, R query heads of one kv head (H = G R),
C query rows of a chunk, Q query_len, K key_len, D head_dim.
"""

import math

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_kernels.masks import first_attending_row, hidden_keys, visible_key_stop

__all__ = ["attend"]

# Scores of one chunk; about five tensors of this size live at the backward's peak. Below 32 MiB
# glibc serves them from its heap, whose holes raised the causal peak at (1, 8, 8192, 128) from
# 1.2 to 3.8 GiB; above, it maps and unmaps each one.
CHUNK_BYTES = 48 * 2**20


def attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> Tensor:
    """Return attention in FP64, `(batch, heads, query_len, head_dim)`; arguments as in `api`."""
    kv_heads, query_len, key_len = k.shape[1], q.shape[2], k.shape[2]
    k_BGKD, v_BGKD = k.double(), v.double()
    q_BGRQD = q.double().unflatten(1, (kv_heads, -1))
    start = first_attending_row(query_len, key_len, causal)
    budget = CHUNK_BYTES // (8 * q.shape[0] * q.shape[1])
    chunks = [torch.zeros_like(q_BGRQD[..., :start, :])]
    while start < query_len:
        visible = visible_key_stop(start, query_len, key_len, causal)
        rows = range(start, min(start + _chunk_rows(budget, visible, causal), query_len))
        chunks.append(_checkpointed(q_BGRQD, k_BGKD, v_BGKD, rows, causal, scale))
        start = rows.stop
    return torch.cat(chunks, dim=3).flatten(1, 2)


def _chunk_rows(budget: int, visible: int, causal: bool) -> int:
    """Return how many rows have `budget` scores: rows * keys, where keys are `visible` before the
    first row and, if causal, one more with each row.
    """
    if not causal:
        return max(1, budget // visible)
    return max(1, (math.isqrt(visible * visible + 4 * budget) - visible) // 2)


def _checkpointed(
    q_BGRQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, rows: range, causal: bool, scale: float
) -> Tensor:
    arguments = (q_BGRQD, k_BGKD, v_BGKD, rows, causal, scale)
    needs_grad = any(x.requires_grad for x in (q_BGRQD, k_BGKD, v_BGKD))
    if not (needs_grad and torch.is_grad_enabled()):
        return _attend_rows(*arguments)
    return checkpoint(_attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(
    q_BGRQD: Tensor, k_BGKD: Tensor, v_BGKD: Tensor, rows: range, causal: bool, scale: float
) -> Tensor:
    query_len, key_len = q_BGRQD.shape[3], k_BGKD.shape[2]
    keys = range(visible_key_stop(rows.stop, query_len, key_len, causal))
    k_BGKD, v_BGKD = k_BGKD[:, :, : keys.stop], v_BGKD[:, :, : keys.stop]
    q_BGRCD = q_BGRQD[..., rows.start : rows.stop, :]
    # Heads of a group are rows of one product, so that k and v are never repeated.
    scores_BGRCK = (q_BGRCD.flatten(2, 3) @ k_BGKD.mT * scale).unflatten(2, (-1, len(rows)))
    hidden_CK = hidden_keys(rows, keys, query_len, key_len, causal, q_BGRQD.device)
    if hidden_CK is not None:
        scores_BGRCK = scores_BGRCK.masked_fill(hidden_CK, -torch.inf)
    weights_BGRCK = torch.softmax(scores_BGRCK, dim=-1)
    return (weights_BGRCK.flatten(2, 3) @ v_BGKD).unflatten(2, (-1, len(rows)))
