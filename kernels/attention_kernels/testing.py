"""What a user needs to hold an attention of their own against these: shapes, inputs, a budget.

The budget is the rule of flash-attn's own tests: a candidate may err, against FP64, a small
multiple of what plain attention in the same dtype errs on the same inputs. It scales with dtype,
length and distribution, and leaves no tolerance to choose. Leaves out which attentions to hold
against each other, and at which inputs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, input_format

__all__ = [
    "HARD_SHAPES",
    "Shape",
    "assert_within_budget",
    "error_budget",
    "make_qkv",
    "nan_filled",
    "with_gradients",
]


class Shape(NamedTuple):
    """One attention problem; `str()` of it is a test id that spells it."""

    batch: int
    heads: int
    kv_heads: int
    query_len: int
    key_len: int
    head_dim: int

    def __str__(self) -> str:
        return (
            f"b{self.batch}-h{self.heads}-g{self.kv_heads}"
            f"-q{self.query_len}-k{self.key_len}-d{self.head_dim}"
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

    def draw(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.head_dim)
        x = torch.randn(size, generator=generator, device=generator.device)
        if outliers:
            rare = torch.rand(size, generator=generator, device=generator.device) < 0.001
            x += 10 * torch.randn(size, generator=generator, device=generator.device) * rare
        return x.to(dtype)

    return (
        draw(shape.heads, shape.query_len),
        draw(shape.kv_heads, shape.key_len),
        draw(shape.kv_heads, shape.key_len),
    )


def with_gradients(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **options: Any
) -> dict[str, Tensor]:
    """Run `attention(q, k, v, **options)` and its backward; return out, dq, dk and dv by name.

    `dout` is cast to the dtype of out. For gradients in FP64 hand the golden FP64 copies.
    """
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves, **options)
    gradients = torch.autograd.grad(out, leaves, dout.to(out.dtype))
    return dict(zip(("out", "dq", "dk", "dv"), (out.detach(), *gradients), strict=True))


def assert_within_budget(
    candidate: Tensor, baseline: Tensor, golden: Tensor, factor: float = 2.0, what: str = "out"
) -> None:
    """Assert max|candidate - golden| <= `error_budget` in the candidate's dtype.

    AssertionError says `what` failed and by how much; a NaN or infinity in the candidate always
    fails.
    """
    error = _max_error(candidate, golden)
    budget = error_budget(baseline, golden, candidate.dtype, factor)
    if not error <= budget:
        allowed = _max_error(baseline, golden)
        raise AssertionError(
            f"{what}: max error {error:.3e} is over the budget {budget:.3e} = {factor:g} * "
            f"{allowed:.3e} of the baseline + {budget - factor * allowed:.3e} of rounding"
        )


def error_budget(
    baseline: Tensor, golden: Tensor, dtype: torch.dtype, factor: float = 2.0
) -> float:
    """Return factor * max|baseline - golden| + half a spacing: what a candidate may err.

    The spacing is that of `dtype` at golden's largest magnitude: a correctly rounded candidate can
    err by half of it even where the baseline happens to be exact.
    """
    spacing = _spacing(golden.double().abs().max().item(), dtype)
    return factor * _max_error(baseline, golden) + spacing / 2


def _max_error(x: Tensor, golden: Tensor) -> float:
    return (x.double() - golden.double()).abs().max().item()


def _spacing(magnitude: float, dtype: torch.dtype) -> float:
    format = FORMATS[input_format(dtype)]
    exponent = torch.frexp(torch.tensor(magnitude, dtype=torch.float64)).exponent.item() - 1
    return 2.0 ** (max(exponent, format.min_exponent) - format.mantissa_bits)


@contextmanager
def nan_filled() -> Iterator[None]:
    """Inside the context the `torch.empty` family gives NaN, so that an unwritten value shows.

    Covers floating-point tensors made from Python. The deterministic mode of torch, which fills
    them too, can't serve: it makes cuBLAS raise unless an environment variable is set.
    """

    def filling(make: Any) -> Any:
        def make_filled(*args: Any, **kwargs: Any) -> Tensor:
            x = make(*args, **kwargs)
            if x.is_floating_point():
                x.detach().fill_(torch.nan)  # detached: a leaf may require grad
            return x

        return make_filled

    with (
        mock.patch.object(torch, "empty", filling(torch.empty)),
        mock.patch.object(torch, "empty_like", filling(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", filling(torch.empty_strided)),
        mock.patch.object(Tensor, "new_empty", filling(Tensor.new_empty)),
    ):
        yield
