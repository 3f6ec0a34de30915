"""Attentions that a check is tried on, and small cells for it."""

import functools

import torch

from attention_kernels import PROFILES, baseline_attention, flash_attention, golden_attention
from attention_kernels.testing import Shape, check_attention
from attention_kernels.testing.cells import QUICK, Cell

FA2 = functools.partial(flash_attention, numerics=PROFILES["fa2"])


ONE = [Cell(law="normal", shape=Shape(2, 2, 1, 65, 65, 32), causal=True)]


FEW = [
    Cell(law="normal", shape=Shape(6, 2, 1, 65, 65, 32), causal=True),
    Cell(law="normal", shape=Shape(6, 2, 2, 70, 70, 32), causal=False),
]


PLAIN = [cell for cell in QUICK if cell.is_plain()]


UNEQUAL = [cell for cell in QUICK if cell.shape.query_len != cell.shape.key_len]


EMPTY_ROWS = [cell for cell in QUICK if not cell.visible().any(-1).all()]


def quick(attention, dtype="bf16", cells=None, **options):
    return check_attention(attention, dtypes=[dtype], quick=True, cells=cells, **options)


def plain(q, k, v, *, causal, scale=None):
    return baseline_attention(q, k, v, causal=causal, scale=scale)


def golden(q, k, v, *, causal, scale=None):
    return golden_attention(q, k, v, causal=causal, scale=scale).to(q.dtype)


class Turned(torch.autograd.Function):
    """`Turned.apply(x, turn)` is x, and its gradient is what `turn` makes of it."""

    @staticmethod
    def forward(ctx, x, turn):
        ctx.turn = turn
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return ctx.turn(grads[0]), None
