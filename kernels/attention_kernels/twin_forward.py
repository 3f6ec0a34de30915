"""The flash recurrence in plain PyTorch, with every rounding point of `ForwardNumerics`.

Online softmax over key blocks in increasing order (FlashAttention-2, arXiv 2307.08691, algorithm
1): running max m, running sum l and unnormalised output acc; out = acc / l and lse = m + log l.
Each `_round` is one rounding point; between them everything is in the work format. Adding to acc
inside the product instead of after it only moves the order of additions. Leaves out gradients
(`twin_backward`), checks (`validation`) and the caller's autocast (`autograd` shuts it out).

Shape suffixes: N batch x query heads, H query heads, I rows of a query block, J keys of a key
block, Q query_len, K key_len, L either length, D head_dim.
"""

import torch
from torch import Tensor

from attention_kernels.formats import round_into, round_to
from attention_kernels.masks import first_attending_row, hidden_keys, visible_key_stop
from attention_kernels.numerics import FlashNumerics

__all__ = ["forward"]


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, numerics: FlashNumerics
) -> tuple[Tensor, Tensor]:
    """Return `out` `(batch, heads, query_len, head_dim)` and `lse` `(batch, heads, query_len)`.

    Both are in the work format. q, k and v come unrounded, `numerics` resolved; a row that attends
    nothing gets out 0 and lse -inf.
    """
    heads, query_len, key_len = q.shape[1], q.shape[2], k.shape[2]
    q_NQD, k_NKD, v_NKD = (_round_operand(x, heads, numerics) for x in (q, k, v))
    out_NQD = torch.zeros_like(q_NQD)
    lse_NQ = q_NQD.new_full(q_NQD.shape[:2], -torch.inf)
    start = first_attending_row(query_len, key_len, causal)
    block = numerics.tiling.block_q
    for row in range(start // block * block, query_len, block):
        rows = range(max(start, row), min(row + block, query_len))
        out_NID, lse_NI1 = _attend_rows(
            q_NQD, k_NKD, v_NKD, rows, causal=causal, scale=scale, numerics=numerics
        )
        out_NQD[:, rows.start : rows.stop] = out_NID
        lse_NQ[:, rows.start : rows.stop] = lse_NI1.squeeze(-1)
    return out_NQD.unflatten(0, (-1, heads)), lse_NQ.unflatten(0, (-1, heads))


def _round_operand(x: Tensor, heads: int, numerics: FlashNumerics) -> Tensor:
    """Round q, k or v, repeat it to the number of query heads, and make batch x heads one axis."""
    x_BHLD = round_into(x, numerics.forward.operands, numerics.work_dtype())
    if x_BHLD.shape[1] != heads:
        x_BHLD = x_BHLD.repeat_interleave(heads // x_BHLD.shape[1], dim=1)
    return x_BHLD.reshape(-1, *x_BHLD.shape[2:])


def _attend_rows(
    q_NQD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    rows: range,
    *,
    causal: bool,
    scale: float,
    numerics: FlashNumerics,
) -> tuple[Tensor, Tensor]:
    """Run the recurrence of one query block; every row of `rows` attends key 0."""
    point = numerics.forward
    q_NID = q_NQD[:, rows.start : rows.stop]
    acc_NID = torch.zeros_like(q_NID, memory_format=torch.contiguous_format)
    max_NI1 = q_NID.new_full((*q_NID.shape[:2], 1), -torch.inf)
    sum_NI1 = torch.zeros_like(max_NI1)
    key_stop = visible_key_stop(rows.stop, q_NQD.shape[1], k_NKD.shape[1], causal)
    for key in range(0, key_stop, numerics.tiling.block_k):
        keys = range(key, min(key + numerics.tiling.block_k, key_stop))
        k_NJD, v_NJD = k_NKD[:, keys.start : keys.stop], v_NKD[:, keys.start : keys.stop]
        scores_NIJ = round_to(torch.bmm(q_NID, k_NJD.mT).mul_(scale), point.scores)
        hidden_IJ = hidden_keys(rows, keys, q_NQD.shape[1], k_NKD.shape[1], causal, q_NQD.device)
        if hidden_IJ is not None:
            scores_NIJ.masked_fill_(hidden_IJ, -torch.inf)

        block_max_NI1 = scores_NIJ.amax(dim=-1, keepdim=True)
        new_max_NI1 = round_to(torch.maximum(max_NI1, block_max_NI1), point.statistics)
        p_NIJ = round_to(scores_NIJ.sub_(new_max_NI1).exp_(), point.statistics)
        rescale_NI1 = round_to(max_NI1.sub_(new_max_NI1).exp_(), point.statistics)
        sum_NI1 = sum_NI1.mul_(rescale_NI1).add_(p_NIJ.sum(dim=-1, keepdim=True))
        sum_NI1 = round_to(sum_NI1, point.statistics)
        p_NIJ = round_to(p_NIJ, point.probabilities)
        acc_NID = round_to(acc_NID.mul_(rescale_NI1).baddbmm_(p_NIJ, v_NJD), point.accumulator)
        max_NI1 = new_max_NI1
    out_NID = round_to(acc_NID.div_(sum_NI1), point.output)
    return out_NID, round_to(sum_NI1.log_().add_(max_NI1), point.lse)
