"""The FP64 oracle with a fault in it: what a planted fault does to each result, with no rounding.

Each function here is `golden_attention` with one mistake, differentiable, so that forward and
backward are wrong just as those of a kernel with that mistake. They are written as changes of what
golden is given or gives, never as another attention: golden less golden with a fault is then the
fault alone. Leaves out which faults there are and how they get onto a candidate (`faults`).

A kernel's backward gets delta = rowsum(dO * O) and dS = P * (dP - delta). A delta that is off by e
moves dS by -P * e, so dQ by -scale * e * (P K) and dK by -scale * P^T (e * Q). Both are results of
golden itself: the first with k for v, the second the gradient of v where the gradient of out is
e * Q.

Shape suffixes: B batch, H query heads, Q query_len, K key_len, D head_dim.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels.api import AttentionOutput, golden_attention
from attention_kernels.checks import scale_of
from attention_kernels.formats import FORMATS, Format, input_format
from attention_kernels.masks import MaskArguments
from attention_kernels.rounding import round_to

__all__ = [
    "DROPPED",
    "STALE",
    "GoldenFault",
    "biased",
    "causal_leak",
    "delta_off",
    "dropped_key",
    "right",
    "spacing",
    "stale_block",
]

GoldenFault = Callable[[Tensor, Tensor, Tensor, MaskArguments, torch.dtype], AttentionOutput]
"""(q, k, v, mask, dtype) in FP64 to out and LSE in FP64, differentiable. `dtype` is that of the
candidate's out, which only a fault in ULPs asks for."""

DROPPED = 32
"""Of so many keys the last one is dropped; of fewer keys the last."""
STALE = 32
"""Keys of a block; of less than two blocks of keys the second half is stale."""


def right(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
) -> AttentionOutput:
    """Attend without a fault."""
    return golden_attention(q, k, v, return_lse=True, **mask)


def _each_sequence(attend: GoldenFault) -> GoldenFault:
    """Return `attend`, of `(batch, heads, length, head_dim)`, for packed sequences as well."""

    def attend_each(
        q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
    ) -> AttentionOutput:
        starts_q, starts_k = mask.get("cu_seqlens_q"), mask.get("cu_seqlens_k")
        if starts_q is None or starts_k is None:
            return attend(q, k, v, mask, dtype)
        alone = mask.copy()
        del alone["cu_seqlens_q"], alone["cu_seqlens_k"]
        slopes, outs, lses = mask.get("alibi_slopes"), [], []
        # packed q, k and v are (total_tokens, heads, head_dim), a packed LSE (heads, total_tokens)
        ranges = zip(*(pairwise(x.tolist()) for x in (starts_q, starts_k)), strict=True)
        for index, (rows, keys) in enumerate(ranges):
            parts = ((q, rows), (k, keys), (v, keys))
            one_q, one_k, one_v = (x[slice(*at)].transpose(0, 1)[None] for x, at in parts)
            if slopes is not None:
                alone["alibi_slopes"] = slopes[index] if slopes.dim() == 2 else slopes
            if rows[0] == rows[1] or keys[0] == keys[1]:  # golden takes no empty axis
                outs.append(q.new_zeros(rows[1] - rows[0], q.shape[1], v.shape[2]))
                lses.append(q.new_full((q.shape[1], rows[1] - rows[0]), -torch.inf))
                continue
            out, lse = attend(one_q, one_k, one_v, alone, dtype)
            outs.append(out[0].transpose(0, 1))
            lses.append(lse[0])
        return AttentionOutput(torch.cat(outs), torch.cat(lses, dim=1))

    return attend_each


@_each_sequence
def dropped_key(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
) -> AttentionOutput:
    """Attend as if every 32nd key (31, 63, ...) were not there; of fewer keys the last one."""
    every = min(DROPPED, k.shape[2])
    seen = torch.arange(k.shape[2], device=k.device) % every != every - 1
    padding = mask.get("key_padding")
    padding = seen.expand(len(k), -1) if padding is None else seen & padding
    return golden_attention(q, k, v, return_lse=True, **{**mask, "key_padding": padding})


@_each_sequence
def stale_block(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
) -> AttentionOutput:
    """Attend as if the second block of 32 keys still held k and v of the first.

    Of less than 64 keys, blocks are half as long as the sequence; of one key there is no second.
    """
    keys = torch.arange(k.shape[2], device=k.device)
    block = min(STALE, (len(keys) + 1) // 2)
    source = torch.where((keys >= block) & (keys < 2 * block), keys - block, keys)
    return golden_attention(q, k[:, :, source], v[:, :, source], return_lse=True, **mask)


def causal_leak(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
) -> AttentionOutput:
    """Attend one key past the causal bound; without a causal bound, as golden."""
    if mask.get("causal"):
        left, _ = mask.get("window") or (None, None)
        mask = {**mask, "causal": False, "window": (left, 1)}
    return golden_attention(q, k, v, return_lse=True, **mask)


class _MisreadOut(torch.autograd.Function):
    """Hand out on; backward, q and k get what a delta gives that reads out + `misread`."""

    @staticmethod
    def forward(
        ctx: Any,
        out: Tensor,
        misread: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: MaskArguments,
    ) -> Tensor:
        ctx.save_for_backward(misread, q, k, v)
        ctx.mask = mask
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        misread_BHQD, q_BHQD, k_BHKD, v_BHKD = ctx.saved_tensors
        (dout_BHQD,) = grads
        off_BHQ1 = (dout_BHQD * misread_BHQD).sum(-1, keepdim=True) * scale_of(q_BHQD, ctx.mask)
        dq_BHQD = -off_BHQ1 * golden_attention(q_BHQD, k_BHKD, k_BHKD, **ctx.mask)
        with torch.enable_grad():
            leaf_BHKD = v_BHKD.detach().requires_grad_()
            out_BHQD = golden_attention(q_BHQD, k_BHKD, leaf_BHKD, **ctx.mask)
            (dk_BHKD,) = torch.autograd.grad(out_BHQD, leaf_BHKD, -off_BHQ1 * q_BHQD)
        return dout_BHQD, None, dq_BHQD, dk_BHKD, None, None


def _misread_out(
    out: Tensor, misread: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments
) -> Tensor:
    softcap = mask.get("softcap")
    if softcap:
        # the softcap's derivative, 1 - tanh^2, stands between P and dS, and golden gives neither
        raise ValueError(f"a fault in delta: softcap must be 0, got {softcap}; plant another fault")
    return _MisreadOut.apply(out, misread, q, k, v, mask)


def delta_off(factor: float) -> GoldenFault:
    """Return golden whose backward reads `factor` times rowsum(dO * O) for delta."""

    @_each_sequence
    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
    ) -> AttentionOutput:
        out, lse = golden_attention(q, k, v, return_lse=True, **mask)
        misread = (factor - 1) * out.detach()
        return AttentionOutput(_misread_out(out, misread, q, k, v, mask), lse)

    return attend


def biased(share: float) -> GoldenFault:
    """Return golden whose out is `share` of a spacing too large before it is rounded.

    The spacing is that of `dtype`. The backward reads the biased out, once rounded, in delta: the
    carrier of arXiv 2510.04212. ValueError for FP64, which golden itself has.
    """

    @_each_sequence
    def attend(
        q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dtype: torch.dtype
    ) -> AttentionOutput:
        if dtype == torch.float64:
            raise ValueError(
                "a bias in ULPs: out must be narrower than FP64, got float64; there must be a "
                "rounding to bias"
            )
        format = FORMATS[input_format(dtype)]
        out, lse = golden_attention(q, k, v, return_lse=True, **mask)
        exact = out.detach()
        shift = share * spacing(exact, format)
        misread = round_to(exact + shift, format) - round_to(exact, format)
        return AttentionOutput(_misread_out(out, misread, q, k, v, mask) + shift, lse)

    return attend


def spacing(x: Tensor, format: Format) -> Tensor:
    """Return the spacing of `format` at |x|, in FP64."""
    # From the bits: torch.ldexp would raise 2 to the exponent in FP32.
    exponent = ((x.double().view(torch.int64) >> 52) & 0x7FF).clamp(min=format.min_exponent + 1023)
    return (exponent << 52).view(torch.float64) * 2.0**-format.mantissa_bits
