"""Gradients of the flash recurrence in plain PyTorch, with every point of `BackwardNumerics`.

FlashAttention-2 (arXiv 2307.08691, algorithm 2): P is recomputed from the stored lse, delta =
rowsum(dO * O) stands for rowsum(dP * P), key blocks are the outer loop and query blocks the inner.
Each query head has its own dK and dV; the heads of a group are added at the end, and scale
multiplies dQ and dK there. Leaves out what the forward computes and the same things as it does.

Shape suffixes: N batch x query heads, B batch, H query heads, G kv heads, I rows of a query block,
J keys of a key block, Q query_len, K key_len, L either length, D head_dim.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.formats import round_into, round_to
from attention_kernels.masks import first_attending_row, hidden_keys, visible_key_stop
from attention_kernels.numerics import FlashNumerics, Tiling

__all__ = ["backward"]


class _Rows(NamedTuple):
    """What a query block brings to a tile, and its dQ; lse and delta are `(N, I, 1)`."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    dq: Tensor

    def at(self, rows: range) -> "_Rows":
        return _Rows(*(x[:, rows.start : rows.stop] for x in self))


class _Keys(NamedTuple):
    """What a key block brings to a tile, and its dK and dV."""

    k: Tensor
    v: Tensor
    dk: Tensor
    dv: Tensor

    def at(self, keys: range) -> "_Keys":
        return _Keys(*(x[:, keys.start : keys.stop] for x in self))


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    numerics: FlashNumerics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV, shaped as q, k and v, in the work format.

    `out` and `lse` are what `twin_forward.forward` returned; dout, q, k and v come unrounded. A row
    that attends nothing has gradient 0 and adds nothing to dK and dV.
    """
    heads, kv_heads, query_len, key_len = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    q_NQD, k_NKD, v_NKD, dout_NQD = (_round_operand(x, heads, numerics) for x in (q, k, v, dout))
    delta_NQ1 = (dout_NQD * out.flatten(0, 1)).sum(dim=-1, keepdim=True)
    delta_NQ1 = round_to(delta_NQ1, numerics.backward.delta)
    lse_NQ1 = lse.flatten(0, 1).unsqueeze(-1)
    dq_NQD, dk_NKD, dv_NKD = (torch.zeros_like(x) for x in (q_NQD, k_NKD, v_NKD))
    all_rows = _Rows(q_NQD, dout_NQD, lse_NQ1, delta_NQ1, dq_NQD)
    all_keys = _Keys(k_NKD, v_NKD, dk_NKD, dv_NKD)
    for rows, keys in _tiles(query_len, key_len, causal, numerics.tiling):
        hidden_IJ = hidden_keys(rows, keys, query_len, key_len, causal, q.device)
        _add_tile(all_rows.at(rows), all_keys.at(keys), hidden_IJ, scale, numerics)
    point = numerics.backward.gradients
    return (
        round_to(dq_NQD.mul_(scale).unflatten(0, (-1, heads)), point),
        round_to(_sum_groups(dk_NKD.mul_(scale), heads, kv_heads), point),
        round_to(_sum_groups(dv_NKD, heads, kv_heads), point),
    )


def _round_operand(x: Tensor, heads: int, numerics: FlashNumerics) -> Tensor:
    """Round an operand, repeat it to the number of query heads, and make batch x heads one axis."""
    x_BHLD = round_into(x, numerics.forward.operands, numerics.work_dtype())
    if x_BHLD.shape[1] != heads:
        x_BHLD = x_BHLD.repeat_interleave(heads // x_BHLD.shape[1], dim=1)
    return x_BHLD.reshape(-1, *x_BHLD.shape[2:])


def _tiles(
    query_len: int, key_len: int, causal: bool, tiling: Tiling
) -> Iterator[tuple[range, range]]:
    """Yield the rows and keys of each tile that is not wholly masked, key blocks outermost."""
    first = first_attending_row(query_len, key_len, causal)
    for key in range(0, key_len, tiling.block_k):
        for row in range(first // tiling.block_q * tiling.block_q, query_len, tiling.block_q):
            rows = range(max(first, row), min(row + tiling.block_q, query_len))
            visible = visible_key_stop(rows.stop, query_len, key_len, causal)
            if key < visible:
                yield rows, range(key, min(key + tiling.block_k, visible))


def _add_tile(
    rows: _Rows, keys: _Keys, hidden_IJ: Tensor | None, scale: float, numerics: FlashNumerics
) -> None:
    """Add what one query block and one key block give to dQ, dK and dV, in place."""
    forward, point = numerics.forward, numerics.backward
    scores_NIJ = round_to(torch.bmm(rows.q, keys.k.mT).mul_(scale), forward.scores)
    if hidden_IJ is not None:
        scores_NIJ.masked_fill_(hidden_IJ, -torch.inf)
    p_NIJ = round_to(scores_NIJ.sub_(rows.lse).exp_(), forward.statistics)
    dp_NIJ = round_to(torch.bmm(rows.dout, keys.v.mT), point.dp)
    ds_NIJ = round_to(dp_NIJ.sub_(rows.delta).mul_(p_NIJ), point.ds)
    keys.dv.baddbmm_(round_to(p_NIJ, forward.probabilities).mT, rows.dout)
    keys.dk.baddbmm_(ds_NIJ.mT, rows.q)
    rows.dq.baddbmm_(ds_NIJ, keys.k)
    _round_stored(keys.dv, point.dkv_accumulator)
    _round_stored(keys.dk, point.dkv_accumulator)
    _round_stored(rows.dq, point.dq_accumulator)


def _round_stored(x: Tensor, format: str) -> None:
    x.copy_(round_to(x, format))


def _sum_groups(x_NKD: Tensor, heads: int, kv_heads: int) -> Tensor:
    x_BHKD = x_NKD.unflatten(0, (-1, heads))
    if kv_heads == heads:
        return x_BHKD
    return x_BHKD.unflatten(1, (kv_heads, -1)).sum(dim=2)
