"""The laws that the inputs of a check are drawn from, each made to show a kind of mistake.

Values are drawn in FP32 and rounded to the wanted dtype before anybody computes with them. dout is
drawn from N(0, 1) under every law.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.testing.inputs import Shape, make_qkv

__all__ = ["LAWS", "Inputs", "Law", "draw"]


class Inputs(NamedTuple):
    """q, k and v as in `scaled_dot_product_attention`, and the gradient of out."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor


class Law(NamedTuple):
    """What a law is, in a line, and how it turns N(0, 1) into its own q, k and v in place."""

    what: str
    shape: Callable[[Tensor, Tensor, Tensor, torch.Generator], None]


def _as_drawn(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    pass


def _outliers(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    for x in (q, k, v):
        rare = torch.rand(x.shape, generator=generator) < 0.001
        x += 10 * torch.randn(x.shape, generator=generator) * rare


def _one_signed(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    v.copy_(2 + 2 * torch.rand(v.shape, generator=generator))


def _ties(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    # each key twice, and scores with a standard deviation of 4: two probabilities of exactly 1
    q *= 4
    twice = k.shape[2] // 2 * 2
    k[:, :, 1:twice:2] = k[:, :, 0:twice:2]
    _one_signed(q, k, v, generator)


def _rare_rows(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    for x, factor in ((q, 10.0), (k, 3.0)):
        rare = torch.rand(x.shape[:3], generator=generator) < 0.03
        x[rare] *= factor


def _large_logits(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    q *= 6
    k *= 6


def _far_below_zero(q: Tensor, k: Tensor, v: Tensor, generator: torch.Generator) -> None:
    q += 5
    k -= 5


LAWS: dict[str, Law] = {
    "normal": Law("N(0, 1)", _as_drawn),
    "outliers": Law("N(0, 1) + N(0, 100) Bernoulli(0.001)", _outliers),
    "one-signed v": Law("v from U(2, 4)", _one_signed),
    "tied maxima": Law("each key twice, scores of N(0, 16), v from U(2, 4)", _ties),
    "long rows": Law("N(0, 1) over more than a thousand keys", _as_drawn),
    "rare rows": Law("3 rows of q in 100 times 10, 3 keys in 100 times 3", _rare_rows),
    "large logits": Law("scores of N(0, 36^2): exp overflows unless shifted", _large_logits),
    "far below zero": Law("q near 5, k near -5: exp underflows unless shifted", _far_below_zero),
}
"""By name. "given", inputs of a recorded run, is none of them: it is handed over."""


def draw(law: str, shape: Shape, dtype: torch.dtype, seed: int) -> Inputs:
    """Draw inputs of `law` on the grid of `dtype`; the same seed gives the same values."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = make_qkv(shape, torch.float32, generator)
    dout = torch.randn((*q.shape[:3], v.shape[3]), generator=generator)
    LAWS[law].shape(q, k, v, generator)
    return Inputs(*(x.to(dtype) for x in (q, k, v, dout)))
