"""An attention with a bias of known size: what a measure of bias is put to the test on.

out is computed with FP32 at every point, moved by a share of the spacing that q's dtype has there,
and rounded once, to nearest, in that dtype: its mean signed error is that share, its mean absolute
error grows from 1/4 to 1/4 + share^2 of a spacing, the least that such a bias can cost. The
backward is FP32 and reads this out in delta = rowsum(dO * O), which carries the bias of arXiv
2510.04212 into the weights. A share of 0 is the same attention without bias. Leaves out where a
real bias comes from (`presets.tie_bias`).

Shape suffixes: B batch, H heads, Q query_len, K key_len, D head_dim.
"""

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from attention_kernels import flash_attention, round_to
from attention_kernels.formats import input_format
from stability.metrics.ulp import ulp_size
from stability.probe.attention_registry import ResolvedAttention

__all__ = ["Move", "injected_bias"]

Move = Literal["up", "coin"]
"""`coin` moves each value up or down by the last bit of its FP32 value: as far, with no bias."""


def injected_bias(share: float, move: Move = "up") -> ResolvedAttention:
    """Return the attention whose out is moved by `share` of a spacing before it is rounded.

    It takes q, k and v in BF16 or FP16 with as many heads each, `causal` and `scale`. ValueError
    for another dtype.
    """
    name = f"injected:{move}:{share:g}"
    return ResolvedAttention(
        name=name,
        function=partial(_attend, share=share, move=move),
        description={"implementation": name, "engine": "auto"},
    )


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    share: float,
    move: Move,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"injected_bias: q must be in BF16 or FP16, got {q.dtype}; use autocast, "
            "there must be a rounding to bias"
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    return _Injected.apply(q, k, v, causal, scale, share, move)


class _Injected(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        share: float,
        move: Move,
    ) -> Tensor:
        wide = (x.float() for x in (q, k, v))
        exact, lse = flash_attention(*wide, causal=causal, scale=scale, return_lse=True)
        format = input_format(q.dtype)
        shift = share * ulp_size(exact, format)
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
        return (*(gradient.to(dtype) for gradient in gradients), None, None, None, None)
