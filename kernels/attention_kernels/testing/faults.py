"""Attentions that are wrong on purpose: what a test of attentions must be able to find.

Two mistakes that a kernel could really have, `skip_last_key` and `scale_off`, and one error of a
known size, `injected_bias`. Each takes a right attention and returns the wrong one, so that a fault
can be planted on any candidate. An assay that misses them proves nothing by passing.

The injected bias moves out, computed in FP32, by a share of the spacing that q's dtype has there,
and then rounds it once, to nearest. Its mean signed error is that share. Its mean absolute error
grows from 1/4 to only 1/4 + share^2 of a spacing, which is the least that such a bias can cost: no
measure of absolute error notices a share of 0.2. The backward is FP32 and reads the biased out in
delta = rowsum(dO * O), through which the bias of arXiv 2510.04212 reaches the weights. With a share
of 0 the result is the same attention without bias.

Shape suffixes: B batch, H heads, Q query_len, K key_len, D head_dim.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels.formats import FORMATS, Format, input_format
from attention_kernels.rounding import round_to

__all__ = ["Move", "injected_bias", "scale_off", "skip_last_key"]

Move = Literal["up", "coin"]
"""Where `injected_bias` moves out: always up, or up or down by the last bit of its FP32 value. The
coin errs as far and has no bias, so it is the control of a measure of bias."""

Attention = Callable[..., Tensor]


def skip_last_key(attention: Attention) -> Attention:
    """Return `attention` as if its loop over keys ended one key early in each sequence.

    `attention` must take `key_padding`. The result takes packed sequences (`cu_seqlens_q` and
    `cu_seqlens_k`), which it attends one by one, or q, k and v of one length.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor, **mask: Any) -> Tensor:
        if q.dim() == 4:
            seen = torch.arange(k.shape[2], device=q.device) < k.shape[2] - 1
            return attention(q, k, v, key_padding=seen.expand(len(k), -1), **mask)
        outs = []
        starts = (mask.pop(name).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k"))
        for rows, keys in zip(*map(itertools.pairwise, starts), strict=True):
            parts = ((q, rows), (k, keys), (v, keys))
            one = [x[start:end].transpose(0, 1)[None] for x, (start, end) in parts]
            outs.append(attend(*one, **mask)[0].transpose(0, 1))
        return torch.cat(outs)

    return attend


def scale_off(attention: Attention, factor: float = 1.01) -> Attention:
    """Return `attention` with its softmax scale multiplied by `factor`."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **mask: Any) -> Tensor:
        right = q.shape[-1] ** -0.5 if scale is None else scale
        return attention(q, k, v, scale=factor * right, **mask)

    return attend


def injected_bias(
    attention: Callable[..., tuple[Tensor, Tensor]], share: float, move: Move = "up"
) -> Attention:
    """Return `attention` with its out moved by `share` of a spacing before it is rounded.

    `attention` is called in FP32 and must take `causal`, `scale` and `return_lse=True`. The result
    takes q, k and v in BF16 or FP16 with as many heads each; ValueError for another dtype.
    """

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        if q.dtype not in (torch.bfloat16, torch.float16):
            raise ValueError(
                f"injected_bias: q must be in BF16 or FP16, got {q.dtype}; use autocast, "
                "there must be a rounding to bias"
            )
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        return _InjectedBias.apply(q, k, v, causal, scale, attention, share, move)

    return attend


def _spacing(x: Tensor, format: Format) -> Tensor:
    """Return the spacing of `format` at |x|, in FP64."""
    # From the bits: torch.ldexp would raise 2 to the exponent in FP32.
    exponent = ((x.double().view(torch.int64) >> 52) & 0x7FF).clamp(min=format.min_exponent + 1023)
    return (exponent << 52).view(torch.float64) * 2.0**-format.mantissa_bits


class _InjectedBias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        attention: Callable[..., tuple[Tensor, Tensor]],
        share: float,
        move: Move,
    ) -> Tensor:
        wide = (x.float() for x in (q, k, v))
        exact, lse = attention(*wide, causal=causal, scale=scale, return_lse=True)
        format = input_format(q.dtype)
        shift = share * _spacing(exact, FORMATS[format])
        if move == "coin":
            shift *= 1 - 2 * (exact.view(torch.int32) & 1)
        out = round_to(exact.double() + shift, format).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.causal, ctx.scale = causal, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, lse_BHQ = ctx.saved_tensors
        q_BHQD, k_BHKD, v_BHKD, out_BHQD, dout_BHQD = (x.float() for x in (*tensors, grads[0]))
        with torch.autocast(dout_BHQD.device.type, enabled=False):
            scores_BHQK = ctx.scale * (q_BHQD @ k_BHKD.mT)
            if ctx.causal:
                hidden_QK = torch.ones_like(scores_BHQK[0, 0], dtype=torch.bool).triu(1)
                scores_BHQK = scores_BHQK.masked_fill(hidden_QK, -torch.inf)
            p_BHQK = torch.exp(scores_BHQK - lse_BHQ.unsqueeze(-1))
            delta_BHQ1 = (dout_BHQD * out_BHQD).sum(-1, keepdim=True)
            ds_BHQK = p_BHQK * (dout_BHQD @ v_BHKD.mT - delta_BHQ1) * ctx.scale
            gradients = ds_BHQK @ k_BHKD, ds_BHQK.mT @ q_BHQD, p_BHQK.mT @ dout_BHQD
        dtype = tensors[0].dtype
        return (*(gradient.to(dtype) for gradient in gradients), *(None,) * 5)
