"""The flash recurrence in plain PyTorch, with every rounding point of `ForwardNumerics`.

Online softmax over key blocks (FlashAttention-2, arXiv 2307.08691, algorithm 1): running max m,
running sum l and unnormalised output acc; out = acc / l and lse = m + log l. `key_outer` is
FlashAttention-1 (arXiv 2205.14135, algorithm 1), where the normalised output goes through memory at
each key block; since rows are independent it is the same loop with another update. Splits are
attended apart and merged by their lse. Each `rounded` is one rounding point; between them
everything is in the work format. Adding to acc inside the product instead of after it only moves
the order of additions. Leaves out gradients (`twin_backward`), checks (`validation`) and the
caller's autocast (`autograd` shuts it out).

Shape suffixes: N batch x query heads, H query heads, I rows of a query block, J keys of a key
block, Q query_len, K key_len, D head_dim; 1 is an axis of one.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.masks import Mask, Sequence
from attention_kernels.numerics import FlashNumerics
from attention_kernels.twin.arithmetic import (
    Flat,
    Rounder,
    block_maximum,
    dot,
    exponential,
    finite_or_zero,
    flatten,
    kept_maximum,
    key_blocks,
    masked_scores,
    refuse_fusion,
)

__all__ = ["forward"]


@dataclass(slots=True)
class _State:
    """What a query block carries from key block to key block; max and sum are `(N, I, 1)`."""

    acc: Tensor
    max: Tensor
    sum: Tensor


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Mask, scale: float, numerics: FlashNumerics
) -> tuple[Tensor, Tensor]:
    """Return `out` `(batch, heads, query_len, head_dim)` and `lse` `(batch, heads, query_len)`.

    Both are in the work format. q, k and v come unrounded, `numerics` resolved; a row that attends
    nothing gets out 0 and lse -inf.
    """
    refuse_fusion(numerics)
    heads, query_len, key_len = q.shape[1], q.shape[2], k.shape[2]
    block_q, block_k = numerics.tiling.block_q, numerics.tiling.block_k
    flat_q = flatten(q, "q", heads, numerics, block_q)
    flat_k, flat_v = (
        flatten(x, name, heads, numerics, block_k) for x, name in ((k, "k"), (v, "v"))
    )
    out_NQD = torch.zeros_like(flat_q.values)
    lse_NQ1 = out_NQD.new_full((*out_NQD.shape[:2], 1), -torch.inf)
    for sequence in mask.sequences(query_len, key_len):
        first, rounded = sequence.queries.start, Rounder(numerics, heads, sequence.index * heads)
        parts = flat_q.at(sequence.queries), flat_k.at(sequence.keys), flat_v.at(sequence.keys)
        step = block_q * _blocks_at_once(sequence, numerics)
        for row in range(0, len(sequence.queries), step):
            rows = range(row, min(row + step, len(sequence.queries)))
            out_NID, lse_NI1 = _attend_rows(*parts, rows, sequence, scale, rounded)
            out_NQD[:, first + rows.start : first + rows.stop] = out_NID
            lse_NQ1[:, first + rows.start : first + rows.stop] = lse_NI1
    return out_NQD.unflatten(0, (-1, heads)), lse_NQ1.squeeze(-1).unflatten(0, (-1, heads))


def _blocks_at_once(sequence: Sequence, numerics: FlashNumerics) -> int:
    """Return how many query blocks to attend in one go: rows do not know of one another.

    Four take 0.63 times as long as one by one at length 4096. One, where blocks see other keys than
    their neighbours or have a factor of their own.
    """
    alike = sequence.mask.offsets() == (None, None) and numerics.scaling.scaling == "none"
    return 4 if alike else 1


def _attend_rows(
    q: Flat, k: Flat, v: Flat, rows: range, sequence: Sequence, scale: float, rounded: Rounder
) -> tuple[Tensor, Tensor]:
    """Attend some rows: every split of the keys, and their merger if there are several."""
    splits = rounded.numerics.tiling.splits
    states = []
    for blocks in key_blocks(rows, sequence, rounded.numerics.tiling):
        state = _start(q, rows)
        for keys in blocks:
            scores_NIJ, _ = masked_scores(q, k, rows, keys, sequence, scale, rounded)
            _update(state, scores_NIJ, v, rows, keys, rounded)
        states.append(state)
    if splits == 1:
        return _finish(states[0], rows, rounded)
    return _merge(states, rows, rounded)


def _start(q: Flat, rows: range) -> _State:
    count, head_dim = q.values.shape[0], q.values.shape[2]
    max_NI1 = q.values.new_full((count, len(rows), 1), -torch.inf)
    acc_NID = q.values.new_zeros((count, len(rows), head_dim))
    return _State(acc_NID, max_NI1, torch.zeros_like(max_NI1))


def _update(
    state: _State, scores_NIJ: Tensor, v: Flat, rows: range, keys: range, rounded: Rounder
) -> None:
    """Fold one block of scores, which is overwritten, into the state."""
    numerics, point, step = rounded.numerics, rounded.numerics.forward, keys.start
    row_value, dims = range(1), range(state.acc.shape[-1])
    statistics, exp = point.statistics, numerics.softmax.exp
    new_max = torch.maximum(state.max, block_maximum(scores_NIJ, numerics.softmax))
    new_max = rounded(new_max, statistics, "max", rows, row_value, step)
    new_max = kept_maximum(state.max, new_max, numerics.softmax)
    shift = finite_or_zero(new_max)
    p_NIJ = exponential(scores_NIJ.sub_(shift), exp)
    p_NIJ = rounded(p_NIJ, statistics, "p", rows, keys)
    alpha = exponential(state.max.sub_(shift), exp)
    alpha = rounded(alpha, statistics, "alpha", rows, row_value, step)
    old_sum = state.sum.mul_(alpha)
    new_sum = old_sum + p_NIJ.sum(dim=-1, keepdim=True)
    new_sum = rounded(new_sum, statistics, "sum", rows, row_value, step)

    p_scale, v_factor = numerics.probability_scale(), v.factor(keys)
    p_NIJ = p_NIJ if p_scale == 1.0 else p_NIJ.mul_(p_scale)
    p_NIJ = rounded(p_NIJ, point.probabilities, "probabilities", rows, keys)
    v_NJD = v.values[:, keys.start : keys.stop]
    carried = old_sum if numerics.tiling.loop_order == "key_outer" else alpha
    acc_NID = state.acc.mul_(carried)
    if v_factor is None and numerics.arithmetic.dot == "ieee":
        acc_NID = acc_NID.baddbmm_(p_NIJ, v_NJD)
    else:
        pv_NID = dot(p_NIJ, v_NJD, numerics.arithmetic.dot)
        acc_NID = acc_NID.add_(pv_NID if v_factor is None else pv_NID.mul_(v_factor / p_scale))
    acc_NID = rounded(acc_NID, point.accumulator, "accumulator", rows, dims, step)
    if numerics.tiling.loop_order == "key_outer":
        acc_NID = acc_NID.div_(_or_one(new_sum))
        acc_NID = rounded(acc_NID, point.output, "output", rows, dims, step)
    state.acc, state.max, state.sum = acc_NID, new_max, new_sum


def _finish(state: _State, rows: range, rounded: Rounder) -> tuple[Tensor, Tensor]:
    point, dims = rounded.numerics.forward, range(state.acc.shape[-1])
    lse_NI1 = rounded(state.max + state.sum.log(), point.lse, "lse", rows, range(1))
    if rounded.numerics.tiling.loop_order == "key_outer":
        return state.acc, lse_NI1
    out_NID = state.acc.div_(_or_one(state.sum))
    return rounded(out_NID, point.output, "output", rows, dims), lse_NI1


def _merge(states: list[_State], rows: range, rounded: Rounder) -> tuple[Tensor, Tensor]:
    """Merge what the splits attended, weighted by exp(lse of a split - the largest lse)."""
    numerics, point = rounded.numerics, rounded.numerics.forward
    dims, one = range(states[0].acc.shape[-1]), range(1)
    outs, lses = [], []
    for index, state in enumerate(states):
        out_NID = state.acc.div_(_or_one(state.sum))
        outs.append(rounded(out_NID, point.accumulator, "split_output", rows, dims, index))
        lse_NI1 = state.max + state.sum.log()
        lses.append(rounded(lse_NI1, point.lse, "split_lse", rows, one, index))
    largest_NI1 = torch.stack(lses).amax(dim=0)
    shift_NI1 = finite_or_zero(largest_NI1)
    total_NI1, acc_NID = torch.zeros_like(shift_NI1), torch.zeros_like(outs[0])
    for index, (out_NID, lse_NI1) in enumerate(zip(outs, lses, strict=True)):
        weight_NI1 = exponential(lse_NI1 - shift_NI1, numerics.softmax.exp)
        weight_NI1 = rounded(weight_NI1, point.statistics, "split_weights", rows, one, index)
        total_NI1 = total_NI1 + weight_NI1
        acc_NID = acc_NID + weight_NI1 * out_NID
    total_NI1 = rounded(total_NI1, point.statistics, "split_total", rows, one)
    out_NID = rounded(acc_NID.div_(_or_one(total_NI1)), point.output, "output", rows, dims)
    lse_NI1 = rounded(shift_NI1 + total_NI1.log(), point.lse, "lse", rows, one)
    return out_NID, lse_NI1


def _or_one(x: Tensor) -> Tensor:
    """Return 1 for 0: what a row that attends nothing is divided by."""
    return torch.where(x == 0, torch.ones_like(x), x)
