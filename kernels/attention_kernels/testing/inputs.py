"""Inputs to test an attention on: shapes that break kernels, and random q, k and v.

Values are drawn in FP32 and rounded to the wanted dtype before anybody computes with them, so that
candidate, baseline and golden all see exactly the same numbers.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.masks import MaskArguments

__all__ = ["HARD_SHAPES", "Shape", "make_packed", "make_qkv"]


class Shape(NamedTuple):
    """One attention problem; `str()` of it is a test id that spells it."""

    batch: int
    heads: int
    kv_heads: int
    query_len: int
    key_len: int
    head_dim: int
    value_dim: int | None = None
    """The head_dim of v and out where it is not that of q and k."""

    def __str__(self) -> str:
        return (
            f"b{self.batch}-h{self.heads}-g{self.kv_heads}"
            f"-q{self.query_len}-k{self.key_len}-d{self.head_dim}"
            + ("" if self.value_dim is None else f"-v{self.value_dim}")
        )


HARD_SHAPES = (
    Shape(1, 1, 1, 1, 1, 16),
    Shape(1, 2, 2, 1, 65, 40),
    Shape(2, 2, 1, 63, 63, 16),
    Shape(1, 2, 2, 64, 64, 64),
    Shape(2, 4, 2, 65, 65, 40),
    Shape(1, 3, 1, 113, 203, 96),
    Shape(1, 2, 2, 203, 113, 59),
    Shape(1, 2, 1, 128, 217, 256),
    Shape(1, 1, 1, 1000, 1000, 32),
)
"""Lengths around a block edge, a head_dim that is no power of two, groups, both length orders."""


def make_qkv(
    shape: Shape, dtype: torch.dtype, generator: torch.Generator, *, outliers: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v from N(0, 1) on the grid of `dtype`, on the generator's device.

    `outliers` adds N(0, 100) to one value in a thousand: the law of FlashAttention-3's table 3
    (arXiv 2407.08608).
    """

    def draw(heads: int, length: int, head_dim: int) -> Tensor:
        size = (shape.batch, heads, length, head_dim)
        x = torch.randn(size, generator=generator, device=generator.device)
        if outliers:
            rare = torch.rand(size, generator=generator, device=generator.device) < 0.001
            x += 10 * torch.randn(size, generator=generator, device=generator.device) * rare
        return x.to(dtype)

    return (
        draw(shape.heads, shape.query_len, shape.head_dim),
        draw(shape.kv_heads, shape.key_len, shape.head_dim),
        draw(shape.kv_heads, shape.key_len, shape.value_dim or shape.head_dim),
    )


def make_packed(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor, Tensor, MaskArguments]:
    """Draw packed q, k and v from N(0, 1), and the causal mask arguments that separate sequences.

    q is `(sum of query_lens, heads, head_dim)`, k and v `(sum of key_lens, kv_heads, head_dim)`, on
    the generator's device. ValueError if there are not as many query lengths as key lengths.
    """
    if len(query_lens) != len(key_lens):
        raise ValueError(
            f"make_packed: key_lens must be as many as query_lens, {len(query_lens)}, "
            f"got {len(key_lens)}; give one of each for every sequence"
        )
    device = generator.device

    def draw(lengths: Sequence[int], heads: int) -> Tensor:
        size = (sum(lengths), heads, head_dim)
        return torch.randn(size, generator=generator, device=device).to(dtype)

    def starts(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    q, k, v = draw(query_lens, heads), draw(key_lens, kv_heads), draw(key_lens, kv_heads)
    cu_seqlens_q, cu_seqlens_k = starts(query_lens), starts(key_lens)
    return q, k, v, {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "causal": True}
