"""Computes the gradients of flash attention in plain PyTorch, tile by tile.

It rounds at every rounding point of `BackwardNumerics`. The algorithm is FlashAttention-2's (arXiv
2307.08691, algorithm 2), with the loop over key blocks outermost:

    P = exp(S - lse),  dP = dO v^T,  dS = P (dP - delta)
    dV += P^T dO,  dK += dS^T q,  dQ += dS k

P is not stored by the forward, but computed again from lse. delta = rowsum(dO * O) replaces
rowsum(dP * P). The two are equal in exact arithmetic only, since O has been rounded. In arXiv
2510.04212 a biased O in BF16 reaches the weights through this delta, and the loss explodes. The O
that delta reads is the one rounded to the format `output`, even if the forward returned O in a
narrower dtype.

Dropout draws again what the forward kept: dP becomes keep / (1 - p) dP after it is rounded, before
delta is subtracted, and dV adds P keep, and is multiplied with 1 / (1 - p) at the end.

What is added to the scores has the gradient dS, before dS is rounded as an operand. Where it is
broadcast that is summed, in the work format, tile by tile.

dK and dV are computed for each query head and added over the heads of a group at the end. There dQ
and dK are also multiplied by scale, in the work format. The forward is in `forward`, and what the
two have in common in `arithmetic`.

Shape suffixes: N batch x query heads, G batch x kv heads, I rows of a query block, J keys of a key
block, Q query_len, K key_len, L either length, D head_dim (of v, in v, dout and dv); 1 is an axis
of length 1.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.masks import Mask, Sequence
from attention_kernels.numerics import FlashNumerics, TensorCoreProduct
from attention_kernels.operands import rotate_back
from attention_kernels.rounding_key import Draws, draws_of
from attention_kernels.score_units import LOG2_E, ScoreUnits, score_units
from attention_kernels.twin.arithmetic import (
    Flat,
    Rounder,
    dot,
    exponents,
    finite_or_zero,
    flat_kept,
    flat_sinks,
    flatten,
    masked_scores,
    refuse_fusion,
    weights,
)

__all__ = ["backward"]

_OPERANDS = {
    "dv_product": ("backward_probabilities", "dout"),
    "dk_product": ("ds", "q"),
    "dq_product": ("ds", "k"),
}
"""The points at which both operands of a product are rounded."""


class _Rows(NamedTuple):
    """The tensors of one sequence that have a row for each query; dq and dbias are written.

    lse and delta are `(N, L, 1)`, dbias `(B, H, Q, K)` with 1 where the bias is broadcast.
    """

    q: Flat
    dout: Flat
    lse: Tensor
    delta: Tensor
    dq: Tensor
    dbias: Tensor | None


class _Keys(NamedTuple):
    """The tensors of one sequence that have a row for each key; dk and dv are written."""

    k: Flat
    v: Flat
    dk: Tensor
    dv: Tensor


class _Sums(NamedTuple):
    """The running sums that a tile is added to: dQ of its query block, dK and dV of its key block.

    All three are changed in place.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
    bias_trained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return dQ, dK, dV, the gradient of the sinks if there are any, and that of the bias.

    All are in the work dtype; that of the bias, shaped as it is, is computed where `bias_trained`.
    `out` and `lse` are what `forward.forward` returned. dout, q, k and v are passed unrounded; this
    function rounds them as operands. A query that attends to no key has gradient 0 and adds nothing
    to dK, dV and the gradient of the bias. `draws` is the forward's.
    """
    refuse_fusion(numerics)
    draws = draws or draws_of(numerics.arithmetic.seed)
    heads, kv_heads = q.shape[1], k.shape[1]
    block_q, block_k = numerics.tiling.block_q, numerics.tiling.block_k
    flat_q, flat_dout = (
        flatten(x, name, heads, numerics, block_q, draws) for x, name in ((q, "q"), (dout, "dout"))
    )
    flat_k, flat_v = (
        flatten(x, name, heads, numerics, block_k, draws) for x, name in ((k, "k"), (v, "v"))
    )
    # A query that attends to no key has lse -inf, and -inf - -inf would be NaN. With lse 0 instead,
    # its P is exp(-inf - 0) = 0.
    out_NQD, lse_NQ1 = (
        out.to(lse.dtype).flatten(0, 1),
        finite_or_zero(lse.flatten(0, 1).unsqueeze(-1)),
    )
    dq_NQD, dk_NKD, dv_NKD = (torch.zeros_like(x.values) for x in (flat_q, flat_k, flat_v))
    sinks_N11 = flat_sinks(mask, out_NQD)
    dsinks_N11 = None if sinks_N11 is None else torch.zeros_like(sinks_N11)
    trained = mask.bias if bias_trained else None
    dbias = None if trained is None else out_NQD.new_zeros(trained.shape)
    units = score_units(numerics, mask, scale)
    for sequence in mask.sequences(q.shape[2], k.shape[2]):
        at_q, at_k = _slice(sequence.queries), _slice(sequence.keys)
        rounded = Rounder(numerics, heads, draws, sequence.index)
        part = flat_dout.at(sequence.queries)
        every = range(len(sequence.queries))
        products_NQD = part.restored() * out_NQD[at_q]
        products_NQD = rounded(products_NQD, "delta_products", every, range(v.shape[3]))
        delta_NQ1 = rounded(products_NQD.sum(dim=-1, keepdim=True), "delta", every, range(1))
        at = flat_q.at(sequence.queries)
        rows = _Rows(at, part, lse_NQ1[at_q], delta_NQ1, dq_NQD[at_q], dbias)
        keys = _Keys(flat_k.at(sequence.keys), flat_v.at(sequence.keys), dk_NKD[at_k], dv_NKD[at_k])
        _attend(rows, keys, sequence, scale, units, rounded)
        if sinks_N11 is not None and dsinks_N11 is not None:
            # dS of a key whose dP is 0, since its value is; by an exact exp, as the kernel's launch
            p_NQ1 = torch.exp(sinks_N11 - lse_NQ1[at_q])
            dsinks_N11 -= (p_NQ1 * delta_NQ1).sum(dim=1, keepdim=True)
    # dQ and dK are multiplied by scale after the sums, once per element. If each tile of dS is
    # multiplied instead, the scaled values are rounded to the format `ds`.
    scale = scale if numerics.arithmetic.gradient_scale == "sums" else 1.0
    dk_GKD = _sum_groups(dk_NKD, heads, kv_heads).mul_(scale)
    dv_GKD = _sum_groups(dv_NKD, heads, kv_heads)
    dv_GKD = dv_GKD if mask.dropout_p == 0 else dv_GKD.mul_(mask.kept_scale())
    gradients = {"dq": dq_NQD.mul_(scale), "dk": dk_GKD, "dv": dv_GKD}
    for name in ("dq", "dk"):
        gradients[name] = rotate_back(gradients[name], numerics)
    dq, dk, dv = (
        _round_gradient(x, name, mask, (q, k), numerics, draws) for name, x in gradients.items()
    )
    dsinks = None if dsinks_N11 is None else dsinks_N11.view(-1, heads).sum(dim=0)
    return dq, dk, dv, dsinks, dbias


def _slice(rows: range) -> tuple[slice, slice]:
    """Return the index that selects `rows` along the second axis of an `(N, L, D)` tensor."""
    return slice(None), slice(rows.start, rows.stop)


def _attend(
    rows: _Rows,
    keys: _Keys,
    sequence: Sequence,
    scale: float,
    units: ScoreUnits,
    rounded: Rounder,
) -> None:
    """Compute dQ, dK and dV of one sequence, tile by tile, with key blocks in the outer loop."""
    # Each block is summed in a contiguous tensor of its own and copied at the end. Into a slice of
    # a larger tensor, baddbmm_ adds one matrix at a time, and the backward takes 1.2 times as long
    # at shape (1, 4, 4096, 64).
    tiling = rounded.numerics.tiling
    query_len, key_len = len(sequence.queries), len(sequence.keys)
    row_blocks = _blocks(query_len, tiling.block_q)
    key_blocks = _blocks(key_len, tiling.block_k)
    dq_blocks = [torch.zeros_like(rows.dq[_slice(row)]).contiguous() for row in row_blocks]
    for key in reversed(key_blocks) if tiling.key_order == "reversed" else key_blocks:
        dk_NJD, dv_NJD = (torch.zeros_like(x[_slice(key)]).contiguous() for x in (keys.dk, keys.dv))
        for row, dq_NID in zip(row_blocks, dq_blocks, strict=True):
            # Tiles that the mask hides entirely are skipped.
            seen = sequence.mask.key_range(row, query_len, key_len)
            if key.start < seen.stop and key.stop > seen.start:
                sums = _Sums(dq_NID, dk_NJD, dv_NJD)
                _add_tile(rows, keys, sums, row, key, sequence, scale, units, rounded)
        keys.dk[_slice(key)], keys.dv[_slice(key)] = dk_NJD, dv_NJD
    for row, dq_NID in zip(row_blocks, dq_blocks, strict=True):
        rows.dq[_slice(row)] = dq_NID


def _blocks(length: int, size: int) -> list[range]:
    return [range(start, min(start + size, length)) for start in range(0, length, size)]


def _add_tile(
    rows: _Rows,
    keys: _Keys,
    sums: _Sums,
    row: range,
    key: range,
    sequence: Sequence,
    scale: float,
    units: ScoreUnits,
    rounded: Rounder,
) -> None:
    """Add the products of one tile to dQ, dK and dV, and round these sums.

    `row` and `key` are the tile's queries and keys, counted within the sequence. A factor is the
    scale that an operand was divided by before it was rounded; None stands for 1.
    """
    numerics, at_q, at_k = rounded.numerics, _slice(row), _slice(key)
    scores_NIJ, slope_NIJ = masked_scores(rows.q, keys.k, row, key, sequence, units, rounded)
    p_NIJ = _weights(scores_NIJ, rows.lse[at_q], row, key, units, rounded)
    dout_factor, v_factor = rows.dout.factor(row), keys.v.factor(key)
    dp_NIJ = dot(rows.dout.values[at_q], keys.v.values[at_k].mT, numerics.product("dout", "v"))
    if dout_factor is not None and v_factor is not None:
        dp_NIJ = dp_NIJ.mul_(dout_factor * v_factor)
    dp_NIJ = rounded(dp_NIJ, "dp", row, key)
    kept_NIJ = flat_kept(row, key, p_NIJ, sequence, rounded.heads)
    if kept_NIJ is not None:
        dp_NIJ = dp_NIJ.masked_fill_(~kept_NIJ, 0.0).mul_(sequence.mask.kept_scale())
    ds_NIJ = _score_gradient(rows, p_NIJ, dp_NIJ, slope_NIJ, row, key, scale, rounded)
    # dS used P rounded to `statistics`. For dV, P is an operand of a product: it is scaled, and
    # rounded to `probabilities`.
    p_NIJ = p_NIJ if kept_NIJ is None else p_NIJ.masked_fill_(~kept_NIJ, 0.0)
    p_scale = numerics.probability_scale()
    p_NIJ = p_NIJ if p_scale == 1.0 else p_NIJ.mul_(p_scale)
    p_NIJ = rounded(p_NIJ, "backward_probabilities", row, key)

    # P was multiplied by a power of two, which keeps it in the range of its format. Dividing dO's
    # factor by the same power undoes that in dV. P is scaled only if the operands are, so whenever
    # p_scale is not 1 there is a factor.
    if dout_factor is not None:
        dout_factor = dout_factor / p_scale
    dq, dk, dv = sums
    dims, v_dims = range(dq.shape[-1]), range(dv.shape[-1])
    at_dq, at_dk = (row, dims, key.start), (key, dims, row.start)
    at_dv = (key, v_dims, row.start)
    q_factor, k_factor = rows.q.factor(row), keys.k.factor(key)
    # Of each: the sum, its product's operands and their factor, both points, and where it lies.
    for total, left, right, factor, product, point, at in (
        (dv, p_NIJ.mT, rows.dout.values[at_q], dout_factor, "dv_product", "dv_accumulator", at_dv),
        (dk, ds_NIJ.mT, rows.q.values[at_q], q_factor, "dk_product", "dk_accumulator", at_dk),
        (dq, ds_NIJ, keys.k.values[at_k], k_factor, "dq_product", "dq_accumulator", at_dq),
    ):
        _add_product(total, left, right, factor, rounded, product, at)
        _store(total, rounded(total, point, *at))


def _weights(
    scores_NIJ: Tensor, lse_NI1: Tensor, row: range, key: range, units: ScoreUnits, rounded: Rounder
) -> Tensor:
    """Return P of one tile, from scores, which are overwritten, and the LSE of their rows."""
    subtracted = lse_NI1 if units.log2 is None else lse_NI1 * LOG2_E
    p_NIJ = rounded(exponents(scores_NIJ, subtracted, units), "backward_exponents", row, key)
    return rounded(weights(p_NIJ, rounded.numerics.softmax.power, units), "backward_p", row, key)


def _score_gradient(
    rows: _Rows,
    p_NIJ: Tensor,
    dp_NIJ: Tensor,
    slope_NIJ: Tensor | None,
    row: range,
    key: range,
    scale: float,
    rounded: Rounder,
) -> Tensor:
    """Return the rounded dS of one tile, of dP, which is overwritten; P is left as it is."""
    ds_NIJ = rounded(dp_NIJ.sub_(rows.delta[_slice(row)]), "ds_difference", row, key)
    if rows.dbias is not None:
        _add_to_bias(rows.dbias, (ds_NIJ * p_NIJ).unflatten(0, (-1, rounded.heads)), row, key)
    if rounded.numerics.arithmetic.gradient_scale == "probabilities":
        p_NIJ = rounded(p_NIJ * scale, "ds_probabilities", row, key)
    ds_NIJ = ds_NIJ.mul_(p_NIJ)
    if slope_NIJ is not None:
        ds_NIJ = ds_NIJ.mul_(slope_NIJ)
    return rounded(ds_NIJ, "ds", row, key)


def _add_to_bias(dbias: Tensor, ds_BHIJ: Tensor, row: range, key: range) -> None:
    """Add dS of one tile, summed over the axes along which the bias is broadcast, in place.

    It is neither rounded to `ds`, which is an operand's format, nor multiplied by the slope of the
    softcap: the bias is added after that.
    """
    one = [axis for axis, size in enumerate(dbias.shape) if size == 1]
    at_row = slice(None) if 2 in one else slice(row.start, row.stop)
    at_key = slice(None) if 3 in one else slice(key.start, key.stop)
    dbias[:, :, at_row, at_key] += ds_BHIJ.sum(one, keepdim=True) if one else ds_BHIJ


def _add_product(
    total: Tensor,
    left: Tensor,
    right: Tensor,
    factor: Tensor | None,
    rounded: Rounder,
    point: str,
    at: tuple[range, range, int],
) -> None:
    """Add `factor` times the batched product to `total`, in place, in one call where that does."""
    numerics = rounded.numerics
    mode = numerics.product(*_OPERANDS[point])
    if factor is None and numerics.targets[point] is None:
        if mode == "ieee":
            total.baddbmm_(left, right)
            return
        if isinstance(mode, TensorCoreProduct):
            total.copy_(dot(left, right, mode, total))
            return
    product = dot(left, right, mode)
    product = product if factor is None else product.mul_(factor)
    total.add_(rounded(product, point, *at))


def _store(total: Tensor, rounded: Tensor) -> None:
    """Copy `rounded` into `total`; a Rounder returns `total` itself where nothing is rounded."""
    if rounded is not total:
        total.copy_(rounded)


def _sum_groups(x_NKD: Tensor, heads: int, kv_heads: int) -> Tensor:
    """Sum a gradient over the query heads of each group; the result is `(G, K, D)`."""
    if kv_heads == heads:
        return x_NKD
    return x_NKD.unflatten(0, (-1, heads // kv_heads)).sum(dim=1)


def _round_gradient(
    x_NLD: Tensor,
    name: str,
    mask: Mask,
    shapes: tuple[Tensor, Tensor],
    numerics: FlashNumerics,
    draws: Draws,
) -> Tensor:
    """Round the gradient called `name`, and return it as `(batch, heads, L, D)`.

    Random bits of stochastic rounding depend on positions within a sequence, so each sequence is
    rounded for itself. Of `shapes`, which are q and k, only the shapes are read.
    """
    q, k = shapes
    heads = q.shape[1] if name == "dq" else k.shape[1]
    dims = range(x_NLD.shape[-1])
    for sequence in mask.sequences(q.shape[2], k.shape[2]):
        lines = sequence.queries if name == "dq" else sequence.keys
        rounded = Rounder(numerics, heads, draws, sequence.index, q.shape[1] // heads)
        part = x_NLD[_slice(lines)]
        _store(part, rounded(part, name, range(len(lines)), dims))
    return x_NLD.unflatten(0, (-1, heads))
