"""Packed q, k and v of sequences of different lengths, and the offsets that say where they start.

Leaves out inputs of one length (`inputs`) and what attends them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["draw_ragged"]


def draw_ragged(
    query_lens: Sequence[int],
    key_lens: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    seed: int,
    device: str = "cpu",
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """Draw q `(tokens, heads, head_dim)`, k and v from N(0, 1) on the grid of `dtype`.

    The last of what is returned is the causal mask of these sequences, as `MaskArguments`.
    ValueError if there are not as many query lengths as key lengths.
    """
    if len(query_lens) != len(key_lens):
        raise ValueError(
            f"draw_ragged: key_lens must be as many as query_lens, {len(query_lens)}, "
            f"got {len(key_lens)}; one of each is for a sequence"
        )
    generator = torch.Generator().manual_seed(seed)

    def draw(lengths: Sequence[int], heads: int) -> Tensor:
        x = torch.randn(sum(lengths), heads, head_dim, generator=generator)
        return x.to(device, dtype)

    def starts(lengths: Sequence[int]) -> Tensor:
        return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=device)

    q, k, v = draw(query_lens, heads), draw(key_lens, kv_heads), draw(key_lens, kv_heads)
    return (
        q,
        k,
        v,
        {
            "cu_seqlens_q": starts(query_lens),
            "cu_seqlens_k": starts(key_lens),
            "causal": True,
        },
    )
