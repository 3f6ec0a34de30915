"""What is watched between q k^T and out: signs inside attention that precede a failing run.

Logits above 1e4 go before divergence (arXiv 2309.14322). In arXiv 2510.04212 three more signs do:
rows whose unnormalised P is exactly 1 at more than one key, a spectral norm of W_Q that grows, and
a delta = rowsum(dO * O) that low precision pushes to one side. A fused kernel keeps none of these
values, so the scores are formed again, in FP32 (FP64 for FP64 inputs), some heads and rows at a
time: memory never holds the query_len x key_len matrix of all heads. Nothing here waits for the
device. Leaves out the thresholds (`instability`).

Shape suffixes: B batch, G kv heads, R query heads of one kv head, C query rows of a chunk, K keys,
D head_dim.
"""

import torch
from torch import Tensor

from attention_kernels import MaskArguments
from attention_kernels.checks import read_mask
from attention_kernels.masks import Mask, Sequence

__all__ = ["INSIDE_METRICS", "delta_gap", "inside_tensor", "spectral_norms"]

INSIDE_METRICS = ("max_logit", "mean_logit", "entropy", "repeated_one_share", "lse_min", "lse_max")

CHUNK_VALUES = 2**20
"""Scores of a chunk."""


def inside_tensor(
    q: Tensor, k: Tensor, *, mask: MaskArguments, valid: Tensor | None = None
) -> Tensor:
    """Return `INSIDE_METRICS`, in that order, as FP64 on q's device.

    q is `(batch, heads, query_len, head_dim)`, k has kv_heads; `valid`, bool `(batch, query_len)`,
    leaves out rows of padding. Rows that attend nothing are left out too; with none left all are
    NaN. `max_logit` and `mean_logit` are over the scores that softmax gets (scaled, capped, biased)
    of pairs that may be attended; `entropy` is the mean of the rows', in nats;
    `repeated_one_share` the share of rows in which exp(score - largest), rounded to q's dtype, is 1
    at more than one key; `lse_min` and `lse_max` are natural logs. ValueError as `flash_attention`.
    """
    masks, scale = read_mask(q, k, mask)
    q, k = q.detach(), k.detach()
    found = _Sums(q.device)
    for sequence in masks.sequences(q.shape[2], k.shape[2]):
        cut = slice(sequence.queries.start, sequence.queries.stop)
        keys = slice(sequence.keys.start, sequence.keys.stop)
        kept = None if valid is None else valid[:, cut]
        _take_sequence(found, q[:, :, cut], k[:, :, keys], sequence, scale, kept)
    return found.metrics()


def spectral_norms(weight: Tensor, heads: int) -> Tensor:
    """Return the largest singular value of each head's rows of W_Q, FP64 `(heads,)`.

    `weight` is `(heads * head_dim, width)`. ValueError if the rows can't be shared out among the
    heads.
    """
    if weight.dim() != 2 or weight.shape[0] % heads:
        raise ValueError(
            f"spectral_norms: weight must be (heads * head_dim, width) for {heads} heads, got "
            f"{tuple(weight.shape)}"
        )
    # By the eigenvalues of each head's Gram matrix, which is head_dim x head_dim and so far smaller
    # than the head's rows. Squaring loses half of FP64's 16 digits; the 8 that are left suffice.
    rows = weight.detach().double().unflatten(0, (heads, -1))
    return torch.linalg.eigvalsh(rows @ rows.mT)[:, -1].clamp(min=0.0).sqrt()


def delta_gap(dout: Tensor, low: Tensor, high: Tensor, *, valid: Tensor | None = None) -> Tensor:
    """Return the sum over rows of rowsum(dout * low) - rowsum(dout * high), 0-d FP64.

    All three are `(batch, heads, query_len, head_dim)`; `valid`, bool, broadcasts to
    `(batch, heads, query_len)` and leaves out rows of padding. This is the error of delta (arXiv
    2510.04212), summed with its sign: errors of both signs cancel, a bias does not.
    """
    # the difference first: two nearly equal row sums would cancel to their last digits
    gap = (dout.detach().double() * (low.detach().double() - high.detach().double())).sum(dim=-1)
    return gap.sum() if valid is None else gap.masked_fill(~valid.expand_as(gap), 0.0).sum()


class _Sums:
    """Running sums over rows and pairs, each 0-d FP64."""

    def __init__(self, device: torch.device) -> None:
        self._zero = torch.zeros((), dtype=torch.float64, device=device)
        self.pairs = self.logits = self.rows = self.entropy = self.repeated = self._zero
        self.largest = self.lse_max = self._zero - torch.inf
        self.lse_min = self._zero + torch.inf

    def metrics(self) -> Tensor:
        found = torch.stack(
            [
                self.largest,
                self.logits / self.pairs,
                self.entropy / self.rows,
                self.repeated / self.rows,
                self.lse_min,
                self.lse_max,
            ]
        )
        return torch.where(self.rows > 0, found, torch.nan)


def _take_sequence(
    found: _Sums, q: Tensor, k: Tensor, sequence: Sequence, scale: float, valid: Tensor | None
) -> None:
    group, key_len = q.shape[1] // k.shape[1], k.shape[2]
    for batch in range(q.shape[0]):
        for head in range(k.shape[1]):
            # the query heads of a group meet one head of k, which is never repeated
            heads = slice(head * group, (head + 1) * group)
            mask = sequence.mask.part(slice(batch, batch + 1), heads)
            step = max(1, CHUNK_VALUES // (group * max(1, key_len)))
            for start in range(0, q.shape[2], step):
                rows = range(start, min(start + step, q.shape[2]))
                kept = None if valid is None else valid[batch, rows.start : rows.stop]
                q_RCD = q[batch, heads, rows.start : rows.stop]
                scores_RCK = _scores(q_RCD, k[batch, head], mask, rows, q.shape[2], scale)
                _take_rows(found, scores_RCK, q.dtype, kept)


def _scores(
    q_RCD: Tensor, k_KD: Tensor, mask: Mask, rows: range, query_len: int, scale: float
) -> Tensor:
    """Return the scores of some rows of one kv head's query heads, -inf where hidden."""
    work = torch.promote_types(q_RCD.dtype, torch.float32)
    keys, lengths = range(k_KD.shape[0]), (query_len, k_KD.shape[0])
    scores_RCK = (q_RCD.to(work) * scale) @ k_KD.to(work).mT
    # capped, then biased, then hidden: the order in which the attention's own scores are made
    if mask.softcap:
        scores_RCK = mask.softcap * torch.tanh(scores_RCK / mask.softcap)
    added = mask.added(rows, keys, *lengths, work, q_RCD.device)
    if added is not None:
        scores_RCK = scores_RCK + (added if added.dim() == 2 else added[0])
    hidden = mask.hidden(rows, keys, *lengths, q_RCD.device)
    if hidden is not None:
        scores_RCK = scores_RCK.masked_fill(hidden if hidden.dim() == 2 else hidden[0], -torch.inf)
    return scores_RCK


def _take_rows(
    found: _Sums, scores_RCK: Tensor, dtype: torch.dtype, valid_C: Tensor | None
) -> None:
    if not scores_RCK.shape[-1]:
        return
    seen_RCK = scores_RCK > -torch.inf
    counts_RC = seen_RCK.any(dim=-1)
    if valid_C is not None:
        counts_RC &= valid_C
        seen_RCK &= valid_C.unsqueeze(-1)
    # a row that attends nothing is shifted by 0: -inf less -inf would be NaN
    largest_RC = scores_RCK.amax(dim=-1)
    shifted_RCK = scores_RCK - largest_RC.masked_fill(~counts_RC, 0.0).unsqueeze(-1)
    p_RCK = shifted_RCK.exp()
    sum_RC = p_RCK.sum(dim=-1)
    # H = log sum - sum p s / sum, of shifted scores; a hidden key's 0 * -inf must be 0
    weighted_RC = (p_RCK * shifted_RCK.masked_fill(~seen_RCK, 0.0)).sum(dim=-1)
    entropy_RC = sum_RC.log() - weighted_RC / sum_RC
    lse_RC = largest_RC + sum_RC.log()
    # in the dtype that a kernel gives P: BF16 makes 1 of exp(x) from x = -0.002 up
    ones_RC = (p_RCK.to(dtype) == 1).sum(dim=-1)

    def total(values: Tensor, which: Tensor) -> Tensor:
        # filled, not multiplied: 0 times -inf is NaN
        return values.double().masked_fill(~which, 0.0).sum()

    # no +=: all sums start as one and the same zero, and would share what is added
    found.pairs = found.pairs + seen_RCK.sum()
    found.logits = found.logits + total(scores_RCK, seen_RCK)
    found.rows = found.rows + counts_RC.sum()
    found.entropy = found.entropy + total(entropy_RC, counts_RC)
    found.repeated = found.repeated + (counts_RC & (ones_RC > 1)).sum()
    found.largest = torch.maximum(
        found.largest, largest_RC.masked_fill(~counts_RC, -torch.inf).amax().double()
    )
    found.lse_max = torch.maximum(
        found.lse_max, lse_RC.masked_fill(~counts_RC, -torch.inf).amax().double()
    )
    found.lse_min = torch.minimum(
        found.lse_min, lse_RC.masked_fill(~counts_RC, torch.inf).amin().double()
    )
