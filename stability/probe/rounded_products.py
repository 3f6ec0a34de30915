"""Matrix products with operands of any format, forward and backward: `emulated:e4m3` of a module.

A `TorchDispatchMode` sees each product below autocast and autograd, with its operands as they are
multiplied, and rounds these to the format first; sums stay in the dtype of the result, and nothing
else is rounded. As FP8 training does (arXiv 2209.05433), each operand is scaled as a whole so that
its largest value fits: here by a power of two, which is exact, so that a format of FP32's range is
rounded to as if there were no scale. A fused attention is left as it is, and told.

`recipe:nvfp4` of a module computes each `F.linear` in it by a recipe of linear layers, whose
products have encodings of their own; other products are left as they are, and told. Leaves out
which operators are products (`products`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from attention_kernels import Format, round_to
from attention_kernels.linear_recipes import LinearRecipe
from attention_kernels.recipe_linear import recipe_linear
from stability.probe.products import COMPOSED, MATMULS, kind_of, name_of

__all__ = ["RecipeProducts", "RoundedProducts", "round_scaled"]


def round_scaled(x: Tensor, format: Format) -> Tensor:
    """Return x, of any floating dtype and shape, rounded to `format` under a scale of its own.

    The scale is the power of two that takes the largest magnitude into the binade below the
    format's top one, so that nothing overflows. The result has x's dtype. Nothing waits for the
    device.
    """
    wide = x if x.dtype == torch.float64 else x.float()
    if not x.numel():
        return x
    largest = torch.where(torch.isfinite(wide), wide, 0.0).abs().amax()
    # largest = m 2^e with m in [0.5, 1)
    exponent = format.max_exponent - torch.frexp(largest).exponent
    # powers of two beyond these are not FP32's
    exponent = torch.where(largest > 0, exponent, 0).clamp(-126, 126)
    return torch.ldexp(round_to(torch.ldexp(wide, exponent), format), -exponent).to(x.dtype)


_PRODUCTS = {*MATMULS, *COMPOSED, "rmatmul", "scaled_dot_product_attention"} - {"linear"}
"""Names of functions that multiply besides `F.linear`, less their underscores."""


class RoundedProducts(TorchDispatchMode):
    """A context in which operands of matrix products are rounded to `format`."""

    def __init__(self, format: Format, left_alone: dict[str, None]) -> None:
        super().__init__()
        self.format = format
        self.left_alone = left_alone
        """Is given the names of fused operators that multiply inside, and stayed as they are."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run the operator, on rounded operands if it is a product."""
        kind = kind_of(func)
        if kind is not None and kind[1] is None:
            self.left_alone.setdefault(name_of(func))
        elif kind is not None:
            places = kind[1] or ()
            args = [self._rounded(x) if i in places else x for i, x in enumerate(args)]
        return func(*args, **(kwargs or {}))

    def _rounded(self, x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [self._rounded(one) for one in x]
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return round_scaled(x, self.format)


class RecipeProducts(TorchFunctionMode):
    """A context in which `F.linear` is computed by `recipe`, forward and backward.

    Its result has the dtype that it has without the recipe. Without a key of a training, stochastic
    rounding draws the same bits in each call of the same shape.
    """

    def __init__(self, recipe: LinearRecipe, left_alone: dict[str, None]) -> None:
        super().__init__()
        self.recipe = recipe
        self.left_alone = left_alone
        """Is given the names of other functions that multiply inside, and stayed as they are."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call the function, or compute it by the recipe if it is `F.linear`."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "").strip("_")
        if name in _PRODUCTS:
            self.left_alone.setdefault(name)
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        out = recipe_linear(input, weight, bias, self.recipe)
        kind = input.device.type
        lowered = torch.is_autocast_enabled(kind)
        return out.to(torch.get_autocast_dtype(kind) if lowered else input.dtype)
