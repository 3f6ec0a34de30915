"""Everything that decides the bits of attention that holds the whole score matrix.

One frozen `BaselineNumerics`; formats are named as in `numerics`. The defaults are eager PyTorch in
the dtype of q. Leaves out the arithmetic (`baseline`) and the named values (`profiles`).
"""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

import torch

from attention_kernels.choices import (
    Written,
    check_choice,
    check_formats,
    resolved,
    unknown_field,
    work_dtype,
)

__all__ = ["BaselineNumerics"]

SCALE_ORDERS = ("after", "before")
SOFTMAX_ROUNDINGS = ("once", "each")
SCALINGS = ("none", "per_tensor")
_CHOICES = ("scale_order", "softmax_rounding", "scaling")


@dataclass(frozen=True, kw_only=True)
class BaselineNumerics(Written):
    """Formats at the rounding points, in the order they occur, and how they are applied.

    Gradients are rounded to the same formats on the way back, but not at `operands` and
    `probabilities`, which are operands of the forward's products alone.
    """

    operands: str = "input"
    """q, k and v as they enter the products; with `scaling`, after it."""
    products: str = "input"
    """q k^T, as the product leaves it."""
    scores: str = "input"
    """scale * (q k^T) with softcap and bias, before the mask."""
    softmax: str = "input"
    """softmax(scores)."""
    probabilities: str = "input"
    """softmax(scores) as operand of the product with v."""
    output: str = "input"
    """softmax v."""
    scale_order: str = "after"
    """`after`: the product is multiplied by scale; `before`: q is, and rounded to `operands`."""
    softmax_rounding: str = "once"
    """`once`: in the work format, rounded at the end, as fused softmaxes do; `each`: the
    exponential, the sum and the quotient are each rounded to `softmax`."""
    scaling: str = "none"
    """`per_tensor`: one factor for each head brings max|x| of q, k and v onto the largest value of
    `operands`; P is multiplied by a power of two then, as in `FlashNumerics`. A format of more than
    5 exponent bits needs neither, and gets none."""

    def __post_init__(self) -> None:
        check_formats(self, *_CHOICES)
        check_choice(self, "scale_order", SCALE_ORDERS)
        check_choice(self, "softmax_rounding", SOFTMAX_ROUNDINGS)
        check_choice(self, "scaling", SCALINGS)
        self._write(self.to_dict())

    def with_(self, **changes: Any) -> Self:
        """Return a copy with single fields changed; ValueError names an unknown field."""
        allowed = [f.name for f in fields(self)]
        for name in changes:
            if name not in allowed:
                raise unknown_field("BaselineNumerics.with_", name, allowed)
        return replace(self, **changes)

    def resolve(self, dtype: torch.dtype) -> Self:
        """Return a copy in which "input" is replaced by the format of `dtype`."""
        return resolved(self, dtype)

    def work_dtype(self) -> torch.dtype:
        """Dtype of the arithmetic between rounding points; call on resolved numerics."""
        return work_dtype(v for name, v in self.to_dict().items() if name not in _CHOICES)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name: what a manifest stores."""
        return asdict(self)
