"""Attention that holds the whole score matrix, rounded as eager PyTorch would in a chosen format.

One autograd path: products and softmax in the work format (FP32, or FP64), a rounding of the value
at each named point on the way forward and of its gradient on the way back. Products are never done
in the narrow format itself, so the bits do not depend on how a machine multiplies BF16 or FP16.
Leaves out blocks and running statistics (`twin_*`).

Shape suffixes: B batch, H query heads, G kv heads, R query heads of one kv head (H = G R),
Q query rows that attend anything, K key_len, D head_dim.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from attention_kernels.arithmetic import ieee_arithmetic
from attention_kernels.formats import round_into
from attention_kernels.masks import first_attending_row, hidden_keys
from attention_kernels.numerics import BaselineNumerics, input_format

__all__ = ["attend"]


class _Round(torch.autograd.Function):
    """Round the value into `work` forward and the gradient into the dtype of x backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, format: str, work: torch.dtype) -> Tensor:
        ctx.format, ctx.dtype = format, x.dtype
        return round_into(x, format, work)

    @staticmethod
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
    def backward(ctx: Any, *grads: Any) -> Any:
        a, b = ctx.saved_tensors
        with ieee_arithmetic(a.device):
            return grads[0] @ b.mT, a.mT @ grads[0]


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, numerics: BaselineNumerics
) -> Tensor:
    """Return attention in q's dtype and shape; `numerics` is resolved, the rest as in `api`."""
    kv_heads, query_len, key_len = k.shape[1], q.shape[2], k.shape[2]
    work, stored = numerics.work_dtype(), input_format(q.dtype)
    q_BHQD, k_BGKD, v_BGKD = (_Round.apply(x, stored, work) for x in (q, k, v))
    start = first_attending_row(query_len, key_len, causal)
    rows, keys = range(start, query_len), range(key_len)
    q_BGRQD = q_BHQD[:, :, start:].unflatten(1, (kv_heads, -1))

    products_BGRQK = _Product.apply(q_BGRQD.flatten(2, 3), k_BGKD.mT).unflatten(2, (-1, len(rows)))
    scores_BGRQK = _Round.apply(products_BGRQK * scale, numerics.scores, work)
    hidden_QK = hidden_keys(rows, keys, query_len, key_len, causal, q.device)
    if hidden_QK is not None:
        scores_BGRQK = scores_BGRQK.masked_fill(hidden_QK, -torch.inf)
    weights_BGRQK = _Round.apply(torch.softmax(scores_BGRQK, dim=-1), numerics.softmax, work)
    out_BGRQD = _Product.apply(weights_BGRQK.flatten(2, 3), v_BGKD).unflatten(2, (-1, len(rows)))
    out_BHQD = _Round.apply(out_BGRQD.flatten(1, 2), numerics.output, work)
    return _Round.apply(F.pad(out_BHQD, (0, 0, start, 0)), stored, q.dtype)
