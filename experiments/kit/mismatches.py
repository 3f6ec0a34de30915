"""Counts the elements of a result that are off by more than a rule allows, as kernel suites count.

There are two rules. flash-attn's budget scales with what plain attention errs on the same inputs
(`attention_kernels.testing.error_budget`). The defaults of torch.testing.assert_close know nothing
of the inputs. How far elements are off on average is the subject of `stability.metrics.deviation`.
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
"""rtol and atol of assert_close: docs.pytorch.org/docs/stable/testing.html"""


class Mismatches(NamedTuple):
    """Counts of elements, and how far the worst is off."""

    elements: int
    outside: int
    """Elements that err more than the budget, against the golden; a NaN does."""
    not_close: int
    """Elements that assert_close's defaults reject, against the golden rounded to x's dtype."""
    max_abs: float
    of_budget: float
    """`max_abs` over the budget."""


def mismatches(x: Tensor, plain: Tensor, golden: Tensor, factor: float = 2.0) -> Mismatches:
    """Count the elements of x, BF16 or FP16, that are off from the FP64 golden.

    `factor` is the budget's: how many times plain attention's largest error it allows.
    `plain` is what plain attention in x's dtype gives on the same inputs. ValueError for another
    dtype.
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
        outside=int((~(error <= limit)).sum().item()),
        not_close=int((~close).sum().item()),
        max_abs=max_abs,
        of_budget=max_abs / limit,
    )


def together(parts: Sequence[Mismatches]) -> Mismatches:
    """Return the counts of several results in all, and the worst of each figure.

    ValueError if there is none.
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
