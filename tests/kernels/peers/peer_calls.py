"""Calls that peers are tested with: shapes, masks by name, and packed sequences."""

import torch

from attention_kernels.testing import Shape, make_qkv

SHAPES = (Shape(2, 4, 2, 65, 65, 40), Shape(2, 4, 2, 23, 70, 64), Shape(1, 4, 4, 70, 23, 64))
LENGTHS = ((5, 9), (9, 5), (0, 4), (7, 7), (3, 0))


def draw(shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(0)
    q, k, v = make_qkv(shape, dtype, generator)
    return [q, k, v, torch.randn(q.shape, generator=generator).to(dtype)]


def alibi(shape):
    return torch.linspace(0.1, 0.8, shape.heads)


def bias(shape):
    x = torch.randn(1, shape.heads, shape.query_len, shape.key_len).mul(2)
    return x.masked_fill(x > 3, -torch.inf)


def visible(shape):
    x = torch.rand(shape.batch, 1, shape.query_len, shape.key_len) < 0.5
    x[:, :, 3] = False  # a row that attends nothing
    return x


def padding(shape):
    return torch.arange(shape.key_len) >= torch.arange(shape.batch).unsqueeze(1) * 5


MASKS = {
    "full": lambda _: {},
    "causal": lambda _: {"causal": True},
    "scaled": lambda _: {"scale": 0.3},
    "window": lambda _: {"window": (7, 3)},
    "left": lambda _: {"causal": True, "window": (7, None)},
    "padding": lambda shape: {"causal": True, "key_padding": padding(shape)},
    "visible": lambda shape: {"attn_mask": visible(shape)},
    "bias": lambda shape: {"attn_mask": bias(shape), "causal": True},
    "alibi": lambda shape: {"alibi_slopes": alibi(shape)},
}


def pack(dtype, lengths=LENGTHS):
    generator = torch.Generator().manual_seed(0)
    queries, keys = (sum(pair[i] for pair in lengths) for i in (0, 1))
    q, k, v = (
        torch.randn(n, h, 32, generator=generator).to(dtype)
        for n, h in ((queries, 4), (keys, 2), (keys, 2))
    )
    starts = torch.tensor([[0, *pair] for pair in zip(*lengths, strict=True)]).cumsum(1).int()
    return q, k, v, {"cu_seqlens_q": starts[0], "cu_seqlens_k": starts[1]}
