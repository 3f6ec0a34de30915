"""The oracle: softmax attention in FP64, over chunks of queries, differentiated by autograd.

It is written as softmax(scale q k^T) v and nothing more. It has no running maximum, no delta and no
hand-written backward, so that it shares no derivation with the flash recurrence that it judges.

One rounding errs by at most 1.1e-16 in FP64, 6.0e-8 in FP32 and 3.9e-3 in BF16, relative: beside
any candidate the oracle counts as exact. Each chunk of queries is a checkpoint: its scores are
computed again in the backward, and neither direction ever holds a query_len x key_len matrix, which
in FP64 would take 8 GiB a head at length 32768.

Leaves out speed, formats and rounding: FP64 is all it knows.

Shape suffixes: B batch, H query heads, G kv heads, R query heads of one kv head (H = G R),
C query rows of a chunk, K keys (in scores those that the chunk may see), D head_dim (of v, in v and
out). A bias has 1 for each axis along which it is broadcast.
"""

from bisect import bisect_right
from collections.abc import Sequence as Many
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from attention_kernels.masks import Mask, Sequence

__all__ = ["attend"]

# Scores of one chunk; about five tensors of this size live at the backward's peak. Below 32 MiB
# glibc serves them from its heap, whose holes raised the causal peak at (1, 8, 8192, 128) from
# 1.2 to 3.8 GiB; above, it maps and unmaps each one.
CHUNK_BYTES = 48 * 2**20


class _Part(NamedTuple):
    """Some rows of out, and of the LSE `(batch, heads, rows)` if it was asked for."""

    out: Tensor
    lse: Tensor | None


def _joined(parts: Many[_Part], dim: int) -> _Part:
    if len(parts) == 1:
        return parts[0]
    lses = [part.lse for part in parts if part.lse is not None]
    return _Part(
        torch.cat([part.out for part in parts], dim), torch.cat(lses, dim) if lses else None
    )


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, with_lse: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return attention in FP64, `(batch, heads, query_len, head_dim of v)`; arguments as in `api`.

    With `with_lse` also the log-sum-exp of the scores `(batch, heads, query_len)`, no gradient.
    """
    # a product of other strides may be another routine of the library, with other bits
    q, k, v = (x.double().contiguous() for x in (q, k, v))
    # Apart from the mask, and cut by `_parts`: a slice's backward fills a tensor of the whole size,
    # which each chunk would add to the others'. FP64 here makes those that share a row add in FP64.
    bias, mask = mask.bias, replace(mask, bias=None)
    if bias is not None and bias.requires_grad:
        bias = bias.double()
    sequences = list(mask.sequences(q.shape[2], k.shape[2]))
    if not sequences:
        out, lse = _nothing(q, v, mask, with_lse)
        # sums of no rows: out hangs on q, k and v, and their gradients are zeros
        out = out + sum(x[:, :, :0].sum() for x in (q, k, v))
        return out if mask.sinks is None else out + mask.sinks[:0].sum(), lse
    queries, keys = [s.queries for s in sequences], [s.keys for s in sequences]
    pieces = zip(sequences, _rows(q, queries), _rows(k, keys), _rows(v, keys), strict=True)
    parts, stop = [], 0
    for sequence, q_rows, k_rows, v_rows in pieces:
        parts.append(_nothing(q[:, :, stop : sequence.queries.start], v, mask, with_lse))
        parts.append(_attend_sequence(q_rows, k_rows, v_rows, bias, sequence, scale, with_lse))
        stop = sequence.queries.stop
    parts.append(_nothing(q[:, :, stop:], v, mask, with_lse))
    return _joined(parts, dim=2)


def _nothing(q: Tensor, v: Tensor, mask: Mask, with_lse: bool) -> _Part:
    """Return what rows give that have no keys: 0, and the sink for LSE."""
    lse = q.new_full(q.shape[:3], -torch.inf) if with_lse else None
    if lse is not None and mask.sinks is not None:
        lse = mask.sinks.detach().double()[:, None].expand(q.shape[:3])
    return _Part(q.new_zeros(*q.shape[:3], v.shape[3]), lse)


def _rows(x: Tensor, ranges: list[range]) -> list[Tensor]:
    """Return the rows of `x` in each of rising ranges; backward, one tensor takes all of them."""
    sizes, stop = [], 0
    for part in ranges:
        sizes += [part.start - stop, len(part)]
        stop = part.stop
    return list(x.split([*sizes, x.shape[2] - stop], dim=2)[1::2])


def _parts(x: Tensor | None, sizes: list[int], dim: int) -> list[Tensor | None]:
    """Return a bias in parts along an axis; where it has but one there, each part is all of it."""
    if x is None or x.shape[dim] == 1:
        return [x] * len(sizes)
    return list(x.split(sizes, dim))


def _attend_sequence(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sequence: Sequence,
    scale: float,
    with_lse: bool,
) -> _Part:
    """Attend as many heads at a time as fit one chunk whole, at least those of one kv head.

    Each time a chunk reads k and v, its backward writes gradients as large as those of all heads
    that are attended together.
    """
    kv_heads, group = k.shape[1], q.shape[1] // k.shape[1]
    fit = CHUNK_BYTES // (8 * group * len(sequence.queries) * len(sequence.keys))
    batches, heads = max(1, fit // kv_heads), min(kv_heads, max(1, fit))
    outs = []
    of_batches = [x.split(batches) for x in (q, k, v)]
    biases = _parts(bias, [len(x) for x in of_batches[0]], dim=0)
    for i, (*of_batch, of_bias) in enumerate(zip(*of_batches, biases, strict=True)):
        sizes = (heads * group, heads, heads)
        of_heads = [x.split(n, dim=1) for x, n in zip(of_batch, sizes, strict=True)]
        by_head = _parts(of_bias, [x.shape[1] for x in of_heads[0]], dim=1)
        row = []
        parts = zip(*of_heads, by_head, strict=True)
        for j, (q_part, k_part, v_part, bias_part) in enumerate(parts):
            at_batch = slice(i * batches, (i + 1) * batches)
            at_heads = slice(j * heads * group, (j + 1) * heads * group)
            part = replace(sequence, mask=sequence.mask.part(at_batch, at_heads))
            given = (q_part, k_part, v_part, bias_part, part)
            row.append(_attend_heads(*given, scale, with_lse))
        outs.append(_joined(row, dim=1))
    return _joined(outs, dim=0)


def _attend_heads(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    sequence: Sequence,
    scale: float,
    with_lse: bool,
) -> _Part:
    kv_heads, query_len, key_len = k.shape[1], q.shape[2], k.shape[2]
    budget = CHUNK_BYTES // (8 * q.shape[0] * q.shape[1])
    rows, start = [], 0
    while start < query_len:
        rows.append(range(start, start + _chunk_rows(budget, start, sequence)))
        start = rows[-1].stop
    chunks, sizes = [], [len(part) for part in rows]
    of_rows = zip(rows, q.split(sizes, dim=2), _parts(bias, sizes, dim=2), strict=True)
    for part, q_part, bias_part in of_rows:
        q_BGRCD = q_part.unflatten(1, (kv_heads, -1))
        keys = sequence.mask.key_range(part, query_len, key_len)
        arguments = (q_BGRCD, k, v, bias_part, part, keys, sequence, scale, with_lse)
        # one chunk alone may keep its scores: recomputing them would save no memory
        attend_rows = _checkpointed if len(rows) > 1 else _attend_rows
        out_BGRCD, lse_BGRC = attend_rows(*arguments)
        lse = None if lse_BGRC is None else lse_BGRC.flatten(1, 2)
        chunks.append(_Part(out_BGRCD.flatten(1, 2), lse))
    return _joined(chunks, dim=2)


def _chunk_rows(budget: int, start: int, sequence: Sequence) -> int:
    """Return the most rows from `start` on whose scores fit `budget`; at least one."""
    query_len, key_len = len(sequence.queries), len(sequence.keys)

    def scores(rows: int) -> int:
        seen = sequence.mask.key_range(range(start, start + rows), query_len, key_len)
        return rows * len(seen)

    # more rows never see fewer keys, so the count rises with them and can be bisected
    return max(1, bisect_right(range(1, query_len - start + 1), budget, key=scores))


def _checkpointed(
    q_BGRCD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    bias_BHCK: Tensor | None,
    rows: range,
    keys: range,
    sequence: Sequence,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    arguments = (q_BGRCD, k_BGKD, v_BGKD, bias_BHCK, rows, keys, sequence, scale, with_lse)
    given = (q_BGRCD, k_BGKD, v_BGKD, bias_BHCK, sequence.mask.sinks)
    needs_grad = any(x is not None and x.requires_grad for x in given)
    # without a backward no scores are kept, so there is nothing to compute again
    if not (needs_grad and torch.is_grad_enabled()):
        return _attend_rows(*arguments)
    # dropout is a function of its seed, so there is no random state to keep for the second pass
    return checkpoint(_attend_rows, *arguments, use_reentrant=False, preserve_rng_state=False)


def _attend_rows(
    q_BGRCD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    bias_BHCK: Tensor | None,
    rows: range,
    keys: range,
    sequence: Sequence,
    scale: float,
    with_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    mask, lengths = sequence.mask, (len(sequence.queries), len(sequence.keys))
    k_BGKD, v_BGKD = (x[:, :, keys.start : keys.stop] for x in (k_BGKD, v_BGKD))
    kv_heads = k_BGKD.shape[1]
    # Heads of a group are rows of one product, so that k and v are never repeated.
    # the scale goes on q: head_dim multiplications a row instead of one a key
    q_BGMD = q_BGRCD.flatten(2, 3) * scale
    scores_BGRCK = (q_BGMD @ k_BGKD.mT).unflatten(2, (-1, len(rows)))
    if mask.softcap:
        scores_BGRCK = mask.softcap * torch.tanh(scores_BGRCK / mask.softcap)
    added = mask.added(rows, keys, *lengths, scores_BGRCK.dtype, scores_BGRCK.device)
    if bias_BHCK is not None:
        if bias_BHCK.shape[3] != 1:
            bias_BHCK = bias_BHCK[..., keys.start : keys.stop]
        added = bias_BHCK.double() if added is None else bias_BHCK.double() + added
    if added is not None:
        scores_BGRCK = scores_BGRCK + _grouped(added, kv_heads)
    hidden = mask.hidden(rows, keys, *lengths, scores_BGRCK.device)
    if hidden is not None:
        scores_BGRCK = scores_BGRCK.masked_fill(_grouped(hidden, kv_heads), -torch.inf)
    if mask.sinks is not None:
        # one more key, the last, which has a logit and no value
        sinks_GR11 = mask.sinks.double().view(kv_heads, -1, 1, 1)
        sinks_BGRC1 = sinks_GR11.expand(*scores_BGRCK.shape[:4], 1)
        scores_BGRCK = torch.cat([scores_BGRCK, sinks_BGRC1], dim=-1)
    weights_BGRCK = _softmax(scores_BGRCK)
    if mask.sinks is not None:
        weights_BGRCK = weights_BGRCK[..., :-1]
    heads = kv_heads * q_BGRCD.shape[2]
    kept_BHCK = mask.kept(rows, keys, len(q_BGRCD), heads, weights_BGRCK.device)
    if kept_BHCK is not None:
        dropped_BGRCK = _grouped(~kept_BHCK, kv_heads)
        weights_BGRCK = weights_BGRCK.masked_fill(dropped_BGRCK, 0.0) * mask.kept_scale()
    out_BGRCD = (weights_BGRCK.flatten(2, 3) @ v_BGKD).unflatten(2, (-1, len(rows)))
    return out_BGRCD, scores_BGRCK.detach().logsumexp(dim=-1) if with_lse else None


def _softmax(scores_BGRCK: Tensor) -> Tensor:
    """Return softmax(scores), zeros for rows that attend nothing."""
    # there is no maximum of no values: amax would raise
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
