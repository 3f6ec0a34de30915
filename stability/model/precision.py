"""A precision's name as what Lightning's Trainer takes: PyTorch's own, a loss scaler, or emulation.

Lightning replaces `16-mixed` on a CPU by `bf16-mixed` and only warns (2.6.6); here FP16 is FP16,
with PyTorch's loss scaler, on every device.

`emulated:<format>` trains FP32 weights whose matrix products are rounded to any format, for formats
that no device at hand computes in. `EmulatedLinear` rounds `F.linear`, which is every matrix
product of the GPT outside its attention, as autocast does with BF16 and FP16: x, W and b to the
format, their product and sum in FP32, the output to the format; backward the same with dO for dX,
dW and db. Products of two values of at most 12 significant bits are exact in FP32 (24 bits), so
against native FP16 or BF16 only the order of additions differs. Formats with a range below BF16's
get the loss scaler too.

`RecipeLinear` computes `F.linear` by a recipe of linear layers (`attention_kernels.recipe_linear`).

Leaves out attention, which rounds to the format at its own rounding points
(`probe.attention_registry.with_input_format`), modules with a precision of their own
(`module_precision`), and the names of precisions (`config.precision`).

Shapes: x `(..., in)`, W `(out, in)`, b `(out,)`.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from threading import local
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_kernels import Format, round_to
from attention_kernels.delayed_scaling import OperandScales
from attention_kernels.linear_recipes import LinearRecipe
from attention_kernels.recipe_linear import recipe_linear
from stability.config.precision import OPERANDS, emulated_format, parse_precision

__all__ = [
    "EmulatedLinear",
    "EmulatedPrecision",
    "RecipeLinear",
    "autocast_dtype",
    "operand_dtype",
    "precision_plugins",
]

_LOWERED = ("bf16-mixed", "bf16", "16-mixed", "fp16")
"""The precisions in which autocast lowers products."""

_OTHER_PRODUCTS = frozenset(
    (
        *("matmul", "__matmul__", "__rmatmul__", "mm", "bmm", "mv", "addmm", "baddbmm", "addmv"),
        *("addbmm", "einsum", "tensordot", "inner", "bilinear", "conv1d", "conv2d", "conv3d"),
    )
)
"""Products that `EmulatedLinear` does not round, by the names of torch's functions."""


def autocast_dtype(precision: str) -> torch.dtype:
    """Return what autocast lowers products to in a mixed precision; FP32 where it is off."""
    return operand_dtype(precision) if precision in _LOWERED else torch.float32


def operand_dtype(precision: str) -> torch.dtype:
    """Return what linear layers multiply in a native precision."""
    return getattr(torch, OPERANDS[precision])


class _Entered(local):
    """The contexts that a thread has entered, innermost last."""

    def __init__(self) -> None:
        self.modes: list[EmulatedLinear] = []


_entered = _Entered()


class EmulatedLinear(TorchFunctionMode):
    """A context in which `F.linear` of FP32 tensors rounds to `format`; all else is unchanged.

    Inside another one it alone decides; with None nothing is rounded. That of a `module`, named by
    a user, refuses products that it would not round: ValueError.
    """

    def __init__(self, format: Format | None, module: str = "") -> None:
        super().__init__()
        self.format = format
        self._module = module

    def __enter__(self) -> "EmulatedLinear":
        """Begin to round."""
        _entered.modes.append(self)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """Round no more."""
        _entered.modes.pop()
        super().__exit__(*exception)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Round where `func` is `F.linear`."""
        if self is not _entered.modes[-1]:
            return func(*args, **(kwargs or {}))
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        if self._rounds and self._module and getattr(func, "__name__", "") in _OTHER_PRODUCTS:
            raise ValueError(
                f"precision: {self._module} must multiply by F.linear alone where its precision is "
                f"emulated, got {func.__name__}; its product would not be rounded"
            )
        return func(*args, **(kwargs or {}))

    @property
    def _rounds(self) -> bool:
        return self.format is not None

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.format is None:
            return F.linear(input, weight, bias)
        if input.dtype in (torch.bfloat16, torch.float16):  # of a module in that precision
            input = input.float()
        return _RoundedLinear.apply(input, weight, bias, self.format)


class RecipeLinear(EmulatedLinear):
    """A context in which `F.linear` is computed by a recipe; all else is unchanged.

    It is entered for one forward of a `module`, which draws by `rounding_key`: of several products
    in there each has bits and delayed `scales` of its own, and the same ones where the forward is
    made again.
    """

    def __init__(
        self,
        recipe: LinearRecipe,
        module: str,
        rounding_key: Sequence[int],
        scales: OperandScales | None = None,
    ) -> None:
        super().__init__(None, module)
        self._recipe = recipe
        self._key = rounding_key
        self._scales = scales
        self._products = 0

    @property
    def _rounds(self) -> bool:
        return True

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        part, self._products = self._products, self._products + 1
        return recipe_linear(
            input,
            weight,
            bias,
            self._recipe,
            rounding_key=self._key,
            part=part,
            scales=self._scales,
        )


class _RoundedLinear(torch.autograd.Function):
    """`F.linear` with operands and results rounded, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, format: Format) -> Tensor:
        x, weight = round_to(x, format), round_to(weight, format)
        if bias is not None:
            bias = round_to(bias, format)
        # a gradient beyond the format's range must become inf: a saturated one would look sound,
        # and the loss scaler would never back off
        ctx.format = replace(format, saturate=False)
        ctx.save_for_backward(x, weight)
        return round_to(F.linear(x, weight, bias), format)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        dout = round_to(grads[0], ctx.format)
        rows = dout.flatten(0, -2)
        with torch.autocast(dout.device.type, enabled=False):  # that of other modules may be on
            dx = round_to(dout @ weight, ctx.format) if ctx.needs_input_grad[0] else None
            dweight = round_to(rows.mT @ x.flatten(0, -2), ctx.format)
        dbias = round_to(rows.sum(dim=0), ctx.format) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


class EmulatedPrecision(MixedPrecision):
    """Mixed precision whose narrow format is emulated in FP32.

    Lightning's own class steps the loss scaler and stores its state; "autocast" is replaced.
    """

    def __init__(self, format: Format, device: str, *, needs_scaler: bool) -> None:
        super().__init__("16-mixed" if needs_scaler else "bf16-mixed", device)
        self.format = format

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Round matrix products where mixed precision would cast their operands."""
        with EmulatedLinear(self.format):
            yield


class _ScaledPrecision(MixedPrecision):
    """Autocast to `dtype` with a loss scaler, whether or not that dtype needs one."""

    def __init__(self, dtype: torch.dtype, device: str) -> None:
        super().__init__("16-mixed", device)
        self._dtype = dtype

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Lower products as the default says."""
        with torch.autocast(self.device, dtype=self._dtype):
            yield


def precision_plugins(name: str, device: torch.device) -> list[MixedPrecision]:
    """Return the plugin that makes the precision `name` true on `device`, none if Lightning's does.

    The loss is scaled where one format in it, of single modules too, has a range below BF16's.
    ValueError as `parse_precision`.
    """
    precision = parse_precision(name)
    format = emulated_format(precision.default)
    if format is not None:
        needs_scaler = precision.needs_scaler
        return [EmulatedPrecision(format, device.type, needs_scaler=needs_scaler)]
    if precision.default == "bf16-mixed" and precision.needs_scaler:
        return [_ScaledPrecision(torch.bfloat16, device.type)]
    return [MixedPrecision("16-mixed", device.type)] if precision.default == "16-mixed" else []
