"""Attention that holds the whole score matrix, rounded as eager PyTorch would in chosen formats.

This is what a deviation is measured against: the attention that a user would write in a few lines
of PyTorch. Products and softmax are computed in the work format (FP32; FP64 where a format or q's
dtype is beyond it). At each named point the value is rounded on the way forward, and its gradient
is rounded to the same format on the way back.

Products are never done in the narrow format itself. How a machine sums BF16 or FP16 products, and
torch's switches for reduced-precision reductions, would then decide bits that no field names.
Rounding the result of an FP32 product names the format and leaves nothing else open.

Leaves out blocks and running statistics (`twin`, `triton`) and shares no code with them but masks
and roundings. Shared errors would cancel in the comparison.

Shape suffixes: B batch, H query heads, G kv heads, R query heads of one kv head (H = G R), L
either length, Q query_len, K key_len, D head_dim (of v, in v and out).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels.formats import format_named, input_format
from attention_kernels.fp_environment import ieee_arithmetic
from attention_kernels.masks import Mask, Sequence
from attention_kernels.numerics import BaselineNumerics
from attention_kernels.rounding import round_into, round_to

__all__ = ["attend"]


class _Round(torch.autograd.Function):
    """Round the value into `work` forward and the gradient into the dtype of x backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, work: torch.dtype) -> Tensor:
        ctx.format, ctx.dtype = format, x.dtype
        return round_into(x, format, work)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return round_into(grads[0], ctx.format, ctx.dtype), None, None


class _Product(torch.autograd.Function):
    """Matrix product whose forward and backward the caller's autocast does not reach."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        with ieee_arithmetic(a.device):
            return a @ b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        with ieee_arithmetic(a.device):
            return grads[0] @ b.mT, a.mT @ grads[0]


class _RoundOperand(torch.autograd.Function):
    """Round the value, at most `largest`, and pass the gradient: the rounding is the product's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, largest: float) -> Tensor:
        return round_to(x if largest == math.inf else x.clamp(-largest, largest), format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None, None


class _Softmax(torch.autograd.Function):
    """Softmax rounded as the numerics say; backward as eager's, from the weights as rounded.

    A row that attends nothing has no weights, and no gradient.
    """

    @staticmethod
    def forward(ctx: Any, scores_BGRQK: Tensor, numerics: BaselineNumerics) -> Tensor:
        largest_BGRQ1 = scores_BGRQK.amax(dim=-1, keepdim=True)
        nothing_BGRQ1 = largest_BGRQ1 == -torch.inf
        # -inf less a maximum of -inf is NaN; a row of zeros gives weights that are set to 0 below
        if nothing_BGRQ1.any():
            scores_BGRQK = scores_BGRQK.masked_fill(nothing_BGRQ1, 0.0)
        if numerics.softmax_rounding == "once":
            # torch's own softmax subtracts the maximum and divides in the work format.
            weights_BGRQK = torch.softmax(scores_BGRQK, dim=-1)
        else:
            largest_BGRQ1 = largest_BGRQ1.masked_fill(nothing_BGRQ1, 0.0)
            # less the maximum, so that none exceeds 1: exp(12) is past FP16's largest, 65504
            p_BGRQK = round_to(torch.exp(scores_BGRQK - largest_BGRQ1), numerics.softmax)
            sum_BGRQ1 = round_to(p_BGRQK.sum(dim=-1, keepdim=True), numerics.softmax)
            weights_BGRQK = p_BGRQK / sum_BGRQ1
        weights_BGRQK = round_to(weights_BGRQK, numerics.softmax)
        if nothing_BGRQ1.any():
            weights_BGRQK = weights_BGRQK.masked_fill(nothing_BGRQ1, 0.0)
        ctx.format = numerics.softmax
        ctx.save_for_backward(weights_BGRQK)
        return weights_BGRQK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        (weights_BGRQK,) = ctx.saved_tensors
        dweights_BGRQK = round_to(grads[0], ctx.format)
        # This is what torch.softmax runs backward. Spelled out, its sum would add in another order.
        run = torch.ops.aten._softmax_backward_data
        return run(dweights_BGRQK, weights_BGRQK, -1, weights_BGRQK.dtype), None


class _Scaled(NamedTuple):
    """An operand on its grid, `(B, H, L, D)`, and the factor of each head, `(B, H, 1, 1)` or 1."""

    values: Tensor
    factor: Tensor | float


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: BaselineNumerics,
    with_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Return attention in q's dtype, of v's head_dim; `numerics` is resolved, the rest as in `api`.

    With `with_lse` also the log-sum-exp of the rounded scores `(batch, heads, query_len)` in the
    work format, without gradient.
    """
    stored = input_format(q.dtype)
    work = torch.promote_types(numerics.work_dtype(), q.dtype)
    q_BHQD, k_BGKD, v_BGKD = (_Round.apply(x, stored, work) for x in (q, k, v))
    parts, stop = [], 0
    lse_BHQ = q_BHQD.new_full(q.shape[:3], -torch.inf) if with_lse else None
    sinks_H = None if mask.sinks is None else _Round.apply(mask.sinks, numerics.scores, work)
    if lse_BHQ is not None and sinks_H is not None:
        lse_BHQ.copy_(sinks_H.detach()[:, None].expand(q.shape[:3]))
    for sequence in mask.sequences(q.shape[2], k.shape[2]):
        queries, keys = sequence.queries, sequence.keys
        # rows between packed sequences belong to none, and attend nothing
        parts.append(q.new_zeros(*q.shape[:2], queries.start - stop, v.shape[3], dtype=work))
        out_BHQD, scores_BGRQK = _attend_sequence(
            q_BHQD[:, :, queries.start : queries.stop],
            k_BGKD[:, :, keys.start : keys.stop],
            v_BGKD[:, :, keys.start : keys.stop],
            sinks_H,
            sequence,
            scale,
            numerics,
        )
        parts.append(out_BHQD)
        if lse_BHQ is not None:
            # of the rounded scores, whose softmax the weights are, and kept out of the graph
            lse_BGRQ = scores_BGRQK.detach().logsumexp(dim=-1)
            lse_BHQ[:, :, queries.start : queries.stop] = lse_BGRQ.flatten(1, 2)
        stop = queries.stop
    parts.append(q.new_zeros(*q.shape[:2], q.shape[2] - stop, v.shape[3], dtype=work))
    if stop == 0:
        # no sequence has queries and keys: sums of no rows make the gradients zeros, not None
        none = sum(x[:, :, :0].sum() for x in (q_BHQD, k_BGKD, v_BGKD))
        none = none if sinks_H is None else none + sinks_H[:0].sum()
        parts.append(parts[0][:, :, :0] + none)
    out_BHQD = _Round.apply(torch.cat(parts, dim=2), numerics.output, work)
    return _Round.apply(out_BHQD, stored, q.dtype), lse_BHQ


def _attend_sequence(
    q_BHQD: Tensor,
    k_BGKD: Tensor,
    v_BGKD: Tensor,
    sinks_H: Tensor | None,
    sequence: Sequence,
    scale: float,
    numerics: BaselineNumerics,
) -> tuple[Tensor, Tensor]:
    """Return out and the rounded scores, with the sink as a last key if there are sinks."""
    query_len = q_BHQD.shape[2]
    scores_BGRQK = _masked_scores(q_BHQD, k_BGKD, sequence, scale, numerics)
    if sinks_H is not None:
        # as GPT-OSS does: a logit more in the softmax, whose weight is then left out
        sinks_GR11 = sinks_H.view(k_BGKD.shape[1], -1, 1, 1)
        sinks_BGRQ1 = sinks_GR11.expand(*scores_BGRQK.shape[:4], 1)
        scores_BGRQK = torch.cat([scores_BGRQK, sinks_BGRQ1], dim=-1)
    weights_BGRQK = _Softmax.apply(scores_BGRQK, numerics)
    if sinks_H is not None:
        weights_BGRQK = weights_BGRQK[..., :-1]
    # before the rounding to `probabilities`, where eager PyTorch would call its dropout
    weights_BGRQK = _dropped(weights_BGRQK, sequence.mask)
    value = _operand(v_BGKD, numerics)
    p_scale = _probability_scale(numerics, sequence.mask.kept_scale())
    if p_scale != 1.0:
        weights_BGRQK = weights_BGRQK * p_scale
    weights_BGRQK = _RoundOperand.apply(weights_BGRQK, numerics.probabilities, math.inf)
    out_BGRQD = _Product.apply(weights_BGRQK.flatten(2, 3), value.values)
    if numerics.scaling != "none":
        out_BGRQD = out_BGRQD * (value.factor / p_scale)
    return out_BGRQD.unflatten(2, (-1, query_len)).flatten(1, 2), scores_BGRQK


def _dropped(weights_BGRQK: Tensor, mask: Mask) -> Tensor:
    """Return the weights that dropout keeps over the probability of keeping, 0 for the others."""
    batches, kv_heads, group, query_len, key_len = weights_BGRQK.shape
    rows, keys = range(query_len), range(key_len)
    kept_BHQK = mask.kept(rows, keys, batches, kv_heads * group, weights_BGRQK.device)
    if kept_BHQK is None:
        return weights_BGRQK
    return weights_BGRQK.masked_fill(_grouped(~kept_BHQK, kv_heads), 0.0) * mask.kept_scale()


def _masked_scores(
    q_BHQD: Tensor, k_BGKD: Tensor, sequence: Sequence, scale: float, numerics: BaselineNumerics
) -> Tensor:
    """Return the rounded scores `(B, G, R, Q, K)`, -inf where hidden."""
    mask, work, kv_heads = sequence.mask, q_BHQD.dtype, k_BGKD.shape[1]
    rows, keys = range(q_BHQD.shape[2]), range(k_BGKD.shape[2])
    if numerics.scale_order == "before":
        q_BHQD, scale = q_BHQD * scale, 1.0
    query, key = _operand(q_BHQD, numerics), _operand(k_BGKD, numerics)
    q_BGMD = query.values.unflatten(1, (kv_heads, -1)).flatten(2, 3)
    scores_BGRQK = _Product.apply(q_BGMD, key.values.mT).unflatten(2, (-1, len(rows)))
    if numerics.scaling != "none":
        assert isinstance(query.factor, Tensor)
        assert isinstance(key.factor, Tensor)
        q_factor = query.factor.unflatten(1, (kv_heads, -1))
        scores_BGRQK = scores_BGRQK * (q_factor * key.factor.unsqueeze(2))
    scores_BGRQK = _Round.apply(scores_BGRQK, numerics.products, work) * scale
    if mask.softcap:
        scores_BGRQK = mask.softcap * torch.tanh(scores_BGRQK / mask.softcap)
    lengths = len(rows), len(keys)
    added = mask.added(rows, keys, *lengths, work, q_BHQD.device)
    if added is not None:
        scores_BGRQK = scores_BGRQK + _grouped(added, kv_heads)
    scores_BGRQK = _Round.apply(scores_BGRQK, numerics.scores, work)
    hidden = mask.hidden(rows, keys, *lengths, q_BHQD.device)
    if hidden is not None:
        scores_BGRQK = scores_BGRQK.masked_fill(_grouped(hidden, kv_heads), -torch.inf)
    return scores_BGRQK


def _operand(x_BHLD: Tensor, numerics: BaselineNumerics) -> _Scaled:
    """Round an operand to its format, brought into its range by a factor for each head if asked."""
    target = format_named(numerics.operands)
    if numerics.scaling == "none":
        return _Scaled(_RoundOperand.apply(x_BHLD, numerics.operands, math.inf), 1.0)
    largest = target.max_value
    # no gradient through the factor: the product is multiplied by it again, so but for rounding
    # out does not depend on it
    peaks = x_BHLD.detach().abs().amax(dim=(-1, -2), keepdim=True)
    factor = peaks / largest
    needs = (factor > 0) & (target.exponent_bits <= 5)
    factor = torch.where(needs, factor, 1.0)
    # The quotient of the largest can round to just beyond the largest value.
    return _Scaled(_RoundOperand.apply(x_BHLD / factor, numerics.operands, largest), factor)


def _probability_scale(numerics: BaselineNumerics, largest: float) -> float:
    """Return the power of two that brings the largest weight to the top of its format."""
    format = format_named(numerics.probabilities)
    if numerics.scaling == "none" or format.exponent_bits > 5:
        return 1.0
    # a power of two multiplies and divides without rounding
    return 2.0 ** math.floor(math.log2(format.max_value / largest))


def _grouped(x: Tensor, kv_heads: int) -> Tensor:
    """Return a tile that broadcasts to (B, H, Q, K) as one that broadcasts to (B, G, R, Q, K)."""
    if x.dim() == 2:
        return x
    return x.unsqueeze(1) if x.shape[1] == 1 else x.unflatten(1, (kv_heads, -1))
