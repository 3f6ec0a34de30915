"""Counts the elements of an attention result that a kernel's test suite would call wrong.

Two rules are counted side by side. flash-attn's tests allow a multiple of the error that plain
attention makes on the same inputs (`attention_kernels.testing.error_budget`), so the limit follows
dtype, length and distribution. The default tolerances of torch.testing.assert_close depend on the
dtype alone. How large errors are on average is left to `stability.metrics.deviation`.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels import round_to
from attention_kernels.formats import input_format
from attention_kernels.testing import error_budget

__all__ = ["Mismatches", "mismatches", "together"]

_DEFAULTS = {
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float16: (1e-3, 1e-5),
}
"""The default (rtol, atol) of assert_close: docs.pytorch.org/docs/stable/testing.html"""


class Mismatches(NamedTuple):
    """How many elements each rule rejects, and how large the worst error is."""

    elements: int
    outside: int
    """Elements whose error against the golden is over the budget; a NaN is always outside."""
    not_close: int
    """Elements that assert_close's defaults reject, against the golden rounded to x's dtype."""
    max_abs: float
    """The largest absolute error against the golden."""
    of_budget: float
    """The ratio of `max_abs` to the budget: above 1, some element is outside."""


def mismatches(x: Tensor, plain: Tensor, golden: Tensor, factor: float = 2.0) -> Mismatches:
    """Count the elements of `x`, a BF16 or FP16 result, that each rule rejects.

    `plain` is the result of plain attention in x's dtype and `golden` that of FP64 attention, both
    on the inputs of `x` and in its shape. The budget allows `factor` times the largest error of
    `plain`, plus half a spacing of x's dtype. ValueError if x is neither BF16 nor FP16.
    """
    if x.dtype not in _DEFAULTS:
        raise ValueError(
            f"mismatches: x must be in BF16 or FP16, got {x.dtype}; its budget is that of a "
            "low-precision result"
        )
    error = (x.double() - golden).abs()
    limit = error_budget(plain, golden, x.dtype, factor)
    rounded = round_to(golden, input_format(x.dtype))
    rtol, atol = _DEFAULTS[x.dtype]
    close = torch.isclose(x.double(), rounded, rtol=rtol, atol=atol)
    max_abs = error.max().item()
    return Mismatches(
        elements=error.numel(),
        # not `error > limit`, which is false for a NaN
        outside=int((~(error <= limit)).sum().item()),
        not_close=int((~close).sum().item()),
        max_abs=max_abs,
        of_budget=max_abs / limit,
    )


def together(parts: Sequence[Mismatches]) -> Mismatches:
    """Merge the counts of several results: add up the counts, take the worst of each error.

    ValueError if `parts` is empty.
    """
    if not parts:
        raise ValueError("together: parts must not be empty; nothing was counted")
    elements, outside, not_close, max_abs, of_budget = zip(*parts, strict=True)
    return Mismatches(
        elements=sum(elements),
        outside=sum(outside),
        not_close=sum(not_close),
        max_abs=max(max_abs),
        of_budget=max(of_budget),
    )
