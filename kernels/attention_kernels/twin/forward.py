"""The flash recurrence in plain PyTorch, with every rounding point of `ForwardNumerics`.

Online softmax over key blocks (FlashAttention-2, arXiv 2307.08691, algorithm 1): running maximum m,
running sum l and unnormalised output acc. For each key block

    m' = max(m, rowmax S),  P = exp(S - m'),  alpha = exp(m - m')
    l' = alpha l + rowsum P,  acc' = alpha acc + P v

and at the end out = acc / l, lse = m + log l. With `key_outer` it is FlashAttention-1 (arXiv
2205.14135, algorithm 1), where the normalised output goes through memory at each key block. Rows
are independent, so that is the same loop with another update. Splits are attended apart and merged
by their lse.

The sum l adds P before it is rounded to `probabilities`, the product P v takes it after: the two
sums are of different numbers, and the weights that v really gets do not add up to exactly 1.
Dropout comes between the two: l adds every P, and the product leaves some out. The factor
1 / (1 - p) of those that are kept is multiplied at the end, onto out, as FlashAttention-2 does;
with `key_outer` onto each block's P v.

Three rules choose m, and none of them matters in exact arithmetic, where m cancels. The plain one
takes the largest score so far. `repeated_max_beta` (arXiv 2510.04212, section 4) moves a block's
maximum where it occurs more than once, so that no P is exactly 1 and the ties of P v in BF16 have
no common direction. `rescale_threshold` (FlashAttention-4) keeps an old maximum that is only a
little too small, and spares the rescaling of acc.

Each call of `rounded` is one rounding point; between them everything is in the work format. Leaves
out gradients (`backward`), the checks of arguments (`checks`) and the caller's autocast, which
`operators` shuts out.

Shape suffixes: N batch x query heads, H query heads, I rows of a query block, J keys of a key
block, Q query_len, K key_len, D head_dim (of v, in v, acc and out); 1 is an axis of one.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from attention_kernels.masks import Mask, Sequence
from attention_kernels.numerics import FlashNumerics, Softmax, TensorCoreProduct
from attention_kernels.rounding_key import Draws, draws_of
from attention_kernels.score_units import LOG2_E, ScoreUnits, score_units
from attention_kernels.twin.arithmetic import (
    Flat,
    Rounder,
    dot,
    exponential,
    exponents,
    finite_or_zero,
    flat_kept,
    flat_sinks,
    flatten,
    masked_scores,
    refuse_fusion,
    weights,
)

__all__ = ["block_maximum", "forward", "running_maximum"]

MAX_SHIFT = 6.0
"""How far beta may move a maximum. Without a bound a score of 20 at beta 7 would leave exp(-120),
nothing. Beyond it whole factors of two are taken back, so that every P keeps the mantissa, and so
the roundings, that the published rule gives it."""
_LOG_2 = math.log(2)


@dataclass(slots=True)
class _State:
    """What a query block carries from key block to key block; max and sum are `(N, I, 1)`."""

    acc: Tensor
    max: Tensor
    sum: Tensor
    unit: Tensor | None
    """What acc is multiplied by at the end, `(N, 1, 1)`; None for 1."""


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `out` `(batch, heads, query_len, head_dim of v)`, `lse` `(batch, heads, query_len)`.

    Both are in the work format. q, k and v come unrounded, `numerics` resolved; a row that attends
    nothing gets out 0 and lse -inf. Stochastic rounding draws by `draws`, and without
    them by the numerics' seed.
    """
    refuse_fusion(numerics)
    draws = draws or draws_of(numerics.arithmetic.seed)
    heads, query_len, key_len = q.shape[1], q.shape[2], k.shape[2]
    block_q, block_k = numerics.tiling.block_q, numerics.tiling.block_k
    flat_q = flatten(q, "q", heads, numerics, block_q, draws)
    flat_k, flat_v = (
        flatten(x, name, heads, numerics, block_k, draws) for x, name in ((k, "k"), (v, "v"))
    )
    out_NQD = flat_q.values.new_zeros((*flat_q.values.shape[:2], v.shape[3]))
    units = score_units(numerics, mask, scale)
    sinks_N11 = flat_sinks(mask, out_NQD)
    lse_NQ1 = out_NQD.new_full((*out_NQD.shape[:2], 1), -torch.inf)
    if sinks_N11 is not None:
        lse_NQ1[:] = sinks_N11  # of a row that has no keys
    for sequence in mask.sequences(query_len, key_len):
        first, rounded = sequence.queries.start, Rounder(numerics, heads, draws, sequence.index)
        parts = flat_q.at(sequence.queries), flat_k.at(sequence.keys), flat_v.at(sequence.keys)
        step = block_q * _blocks_at_once(sequence, numerics)
        for row in range(0, len(sequence.queries), step):
            rows = range(row, min(row + step, len(sequence.queries)))
            out_NID, lse_NI1 = _attend_rows(*parts, sinks_N11, rows, sequence, units, rounded)
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
    q: Flat,
    k: Flat,
    v: Flat,
    sinks_N11: Tensor | None,
    rows: range,
    sequence: Sequence,
    units: ScoreUnits,
    rounded: Rounder,
) -> tuple[Tensor, Tensor]:
    """Attend some rows: every split of the keys, and their merger if there are several."""
    splits = rounded.numerics.tiling.splits
    states = []
    for blocks in _key_blocks(rows, sequence, rounded.numerics):
        # the sink counts once, in the first split
        state = _start(q, v, rows, None if states else sinks_N11, rounded.numerics)
        for keys in blocks:
            scores_NIJ, _ = masked_scores(q, k, rows, keys, sequence, units, rounded)
            _update(state, scores_NIJ, v, rows, keys, sequence, units, rounded)
        states.append(state)
    kept_scale = sequence.mask.kept_scale()
    if splits == 1:
        return _finish(states[0], rows, kept_scale, units, rounded)
    return _merge(states, rows, kept_scale, units, rounded)


def _key_blocks(rows: range, sequence: Sequence, numerics: FlashNumerics) -> Iterator[list[range]]:
    """Yield for each split the key blocks that `rows` may attend, in the order they are read.

    All of them where a block that is hidden from a row moves its maximum.
    """
    query_len, key_len, tiling = len(sequence.queries), len(sequence.keys), numerics.tiling
    seen = sequence.mask.key_range(rows, query_len, key_len)
    seen = range(key_len) if numerics.softmax.moves_hidden else seen
    size = tiling.block_k
    share = math.ceil(math.ceil(key_len / size) / tiling.splits) * size
    for split in range(tiling.splits):
        first = max(seen.start // size * size, split * share)
        last = min(seen.stop, (split + 1) * share)
        blocks = [range(key, min(key + size, key_len)) for key in range(first, last, size)]
        yield blocks[::-1] if tiling.key_order == "reversed" else blocks


def _start(
    q: Flat, v: Flat, rows: range, sinks_N11: Tensor | None, numerics: FlashNumerics
) -> _State:
    """Return the state before the first key; a sink is a key that has been seen, with value 0."""
    count, head_dim = q.values.shape[0], v.values.shape[2]
    max_NI1 = q.values.new_full((count, len(rows), 1), -torch.inf)
    acc_NID = q.values.new_zeros((count, len(rows), head_dim))
    unit_N11 = _unit(v, numerics)
    if sinks_N11 is None:
        return _State(acc_NID, max_NI1, torch.zeros_like(max_NI1), unit_N11)
    return _State(acc_NID, max_NI1.copy_(sinks_N11), torch.ones_like(max_NI1), unit_N11)


def _unit(v: Flat, numerics: FlashNumerics) -> Tensor | None:
    """Return the factor of v and P if it waits until the end, else None.

    A tensor core adds products to its accumulator as they are. So where one factor serves all keys
    of a head, its kernel multiplies by it once, as FlashAttention-3 does; a rounding of acc, or
    of P v, would then round other values, and keeps it in each block.
    """
    rounds = ("rescaled_accumulator", "block_output", "accumulator")
    if (
        numerics.scaling.scaling != "per_tensor"
        or numerics.tiling.loop_order == "key_outer"
        or not isinstance(numerics.product("probabilities", "v"), TensorCoreProduct)
        or any(numerics.targets[point] is not None for point in rounds)
    ):
        return None
    factor = v.factor(range(1))
    return None if factor is None else factor / numerics.probability_scale()


def _update(
    state: _State,
    scores_NIJ: Tensor,
    v: Flat,
    rows: range,
    keys: range,
    sequence: Sequence,
    units: ScoreUnits,
    rounded: Rounder,
) -> None:
    """Fold one block of scores, which is overwritten, into the state."""
    numerics, step = rounded.numerics, keys.start
    row_value, dims, exp = range(1), range(state.acc.shape[-1]), numerics.softmax.power
    new_max = torch.maximum(state.max, block_maximum(scores_NIJ, numerics.softmax))
    new_max = rounded(new_max, "max", rows, row_value, step)
    new_max = running_maximum(state.max, new_max, numerics.softmax, units)
    # A row that has seen no key yet has maximum -inf, and -inf - -inf is NaN; with 0 subtracted
    # instead its P and alpha are exp(-inf) = 0.
    shift = finite_or_zero(new_max)
    subtracted = shift if units.log2 is None else shift * units.log2
    p_NIJ = rounded(exponents(scores_NIJ, subtracted, units), "exponents", rows, keys)
    p_NIJ = rounded(weights(p_NIJ, exp, units), "p", rows, keys)
    alpha = state.max.sub_(shift) if units.log2 is None else state.max.sub_(shift).mul_(units.log2)
    alpha = rounded(alpha, "alpha_exponent", rows, row_value, step)
    alpha = rounded(weights(alpha, exp, units), "alpha", rows, row_value, step)
    old_sum = rounded(state.sum.mul_(alpha), "rescaled_sum", rows, row_value, step)
    block_sum = rounded(p_NIJ.sum(dim=-1, keepdim=True), "block_sum", rows, row_value, step)
    new_sum = rounded(old_sum + block_sum, "sum", rows, row_value, step)

    # the sum above is that of all weights
    kept_NIJ = flat_kept(rows, keys, p_NIJ, sequence, rounded.heads)
    p_NIJ = p_NIJ if kept_NIJ is None else p_NIJ.masked_fill_(~kept_NIJ, 0.0)
    p_scale, key_outer = numerics.probability_scale(), numerics.tiling.loop_order == "key_outer"
    p_NIJ = p_NIJ if p_scale == 1.0 else p_NIJ.mul_(p_scale)
    p_NIJ = rounded(p_NIJ, "probabilities", rows, keys)
    # With key_outer acc is out already, so that l * out is what alpha * acc would be.
    acc_NID = state.acc.mul_(old_sum if key_outer else alpha)
    acc_NID = rounded(acc_NID, "rescaled_accumulator", rows, dims, step)
    kept_scale = sequence.mask.kept_scale() if key_outer else 1.0
    v_factor = v.factor(keys) if state.unit is None else None
    acc_NID = _add_values(acc_NID, p_NIJ, v, v_factor, rows, keys, kept_scale, rounded)
    acc_NID = rounded(acc_NID, "accumulator", rows, dims, step)
    if key_outer:
        acc_NID = acc_NID.div_(_or_one(new_sum))
        acc_NID = rounded(acc_NID, "output", rows, dims, step)
    state.acc, state.max, state.sum = acc_NID, new_max, new_sum


def _add_values(
    acc_NID: Tensor,
    p_NIJ: Tensor,
    v: Flat,
    v_factor: Tensor | None,
    rows: range,
    keys: range,
    kept_scale: float,
    rounded: Rounder,
) -> Tensor:
    """Return the accumulator with P v of one block, in place; P comes times its own scale."""
    v_NJD = v.values[:, keys.start : keys.stop]
    numerics, dims = rounded.numerics, range(v.values.shape[2])
    product = numerics.product("probabilities", "v")
    alone = numerics.targets["block_output"] is not None
    if not alone and v_factor is None and kept_scale == 1.0:
        # Added inside the product or after it: only the order of additions differs.
        if product == "ieee":
            return acc_NID.baddbmm_(p_NIJ, v_NJD)
        # A tensor core adds to its accumulator, and cuts that as it cuts products.
        if isinstance(product, TensorCoreProduct):
            return dot(p_NIJ, v_NJD, product, acc_NID)
    pv_NID = dot(p_NIJ, v_NJD, product)
    if v_factor is not None:
        pv_NID = pv_NID.mul_(v_factor / numerics.probability_scale())
    pv_NID = pv_NID if kept_scale == 1.0 else pv_NID.mul_(kept_scale)
    return acc_NID.add_(rounded(pv_NID, "block_output", rows, dims, keys.start))


def _finish(
    state: _State, rows: range, kept_scale: float, units: ScoreUnits, rounded: Rounder
) -> tuple[Tensor, Tensor]:
    """Return out and lse; what dropout kept is scaled here, and with key_outer in each block."""
    dims = range(state.acc.shape[-1])
    log_NI1 = rounded(state.sum.log(), "log_sum", rows, range(1))
    lse_NI1 = rounded(_natural(state.max, units) + log_NI1, "lse", rows, range(1))
    if rounded.numerics.tiling.loop_order == "key_outer":
        return state.acc, lse_NI1
    out_NID = _restored(state).div_(_or_one(state.sum))
    out_NID = out_NID if kept_scale == 1.0 else out_NID.mul_(kept_scale)
    return rounded(out_NID, "output", rows, dims), lse_NI1


def _merge(
    states: list[_State], rows: range, kept_scale: float, units: ScoreUnits, rounded: Rounder
) -> tuple[Tensor, Tensor]:
    """Merge what the splits attended, weighted by exp(lse of a split - the largest lse)."""
    exp = rounded.numerics.softmax.power
    dims, one = range(states[0].acc.shape[-1]), range(1)
    outs, lses = [], []
    for index, state in enumerate(states):
        out_NID = _restored(state).div_(_or_one(state.sum))
        outs.append(rounded(out_NID, "split_output", rows, dims, index))
        log_NI1 = rounded(state.sum.log(), "log_sum", rows, one, index)
        lse_NI1 = _natural(state.max, units) + log_NI1
        lses.append(rounded(lse_NI1, "split_lse", rows, one, index))
    largest_NI1 = torch.stack(lses).amax(dim=0)
    shift_NI1 = finite_or_zero(largest_NI1)
    total_NI1, acc_NID = torch.zeros_like(shift_NI1), torch.zeros_like(outs[0])
    # Splits are added in their order, as the kernel adds them: their sum depends on it.
    for index, (out_NID, lse_NI1) in enumerate(zip(outs, lses, strict=True)):
        weight_NI1 = rounded(lse_NI1 - shift_NI1, "split_exponent", rows, one, index)
        weight_NI1 = rounded(exponential(weight_NI1, exp), "split_weights", rows, one, index)
        total_NI1 = total_NI1 + weight_NI1
        acc_NID = acc_NID + rounded(weight_NI1 * out_NID, "split_rescaled", rows, dims, index)
    total_NI1 = rounded(total_NI1, "split_total", rows, one)
    out_NID = acc_NID.div_(_or_one(total_NI1))
    out_NID = out_NID if kept_scale == 1.0 else out_NID.mul_(kept_scale)
    out_NID = rounded(out_NID, "output", rows, dims)
    log_NI1 = rounded(total_NI1.log(), "split_log", rows, one)
    lse_NI1 = rounded(shift_NI1 + log_NI1, "lse", rows, one)
    return out_NID, lse_NI1


def _natural(score: Tensor, units: ScoreUnits) -> Tensor:
    return score if units.natural == 1.0 else score * units.natural


def _restored(state: _State) -> Tensor:
    """Return acc times the factor that has waited, in place."""
    return state.acc if state.unit is None else state.acc.mul_(state.unit)


def _or_one(x: Tensor) -> Tensor:
    """Return 1 for 0: what a row that attends nothing is divided by."""
    return torch.where(x == 0, torch.ones_like(x), x)


def block_maximum(scores_NIJ: Tensor, softmax: Softmax) -> Tensor:
    """Return the maximum of each row of a block, `(N, I, 1)`, moved where it is repeated."""
    max_NI1 = scores_NIJ.amax(dim=-1, keepdim=True)
    if softmax.repeated_max_beta == 1.0:
        return max_NI1
    # Counted in the rounded scores: an exact tie of the largest makes several P exactly 1. Ones are
    # counted as numbers, as torch takes three times as long to count bools.
    close_NIJ = torch.empty_like(scores_NIJ)
    torch.ge(scores_NIJ, max_NI1 - softmax.repeated_max_tolerance, out=close_NIJ)
    repeated_NI1 = close_NIJ.sum(dim=-1, keepdim=True) > 1
    moved_NI1 = max_NI1.clamp(min=0.0) * softmax.repeated_max_beta
    if softmax.moves_hidden:
        return torch.where(repeated_NI1 | (max_NI1 == -torch.inf), moved_NI1, max_NI1)
    shift_NI1 = moved_NI1 - max_NI1
    doublings_NI1 = torch.ceil((shift_NI1 - MAX_SHIFT) / _LOG_2).clamp(min=0.0)
    moved_NI1 = max_NI1 + (shift_NI1 - doublings_NI1 * _LOG_2)
    return torch.where(repeated_NI1 & (max_NI1 > -torch.inf), moved_NI1, max_NI1)


def running_maximum(
    old_NI1: Tensor, new_NI1: Tensor, softmax: Softmax, units: ScoreUnits
) -> Tensor:
    """Return the old maximum where the new one exceeds it by no more than the threshold."""
    if softmax.rescale_threshold == 0.0:
        return new_NI1
    growth_NI1 = (new_NI1 - old_NI1) * (LOG2_E if units.log2 is None else units.log2)
    return torch.where(growth_NI1 <= softmax.rescale_threshold, old_NI1, new_NI1)
