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

Leaves out attention, which rounds to the format at its own rounding points
(`probe.attention_registry.with_input_format`), and the names of precisions (`config.schema`).

Shapes: x `(..., in)`, W `(out, in)`, b `(out,)`.
"""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention_kernels import Format, round_to
from stability.config.schema import emulated_format

__all__ = ["EmulatedLinear", "EmulatedPrecision", "precision_plugins"]


class EmulatedLinear(TorchFunctionMode):
    """A context in which `F.linear` of FP32 tensors rounds to `format`; all else is unchanged."""

    def __init__(self, format: Format) -> None:
        super().__init__()
        self.format = format

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Round where `func` is `F.linear`."""
        if func is F.linear:
            return self._linear(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _linear(self, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return _RoundedLinear.apply(input, weight, bias, self.format)


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
        dx = round_to(dout @ weight, ctx.format) if ctx.needs_input_grad[0] else None
        dweight = round_to(rows.mT @ x.flatten(0, -2), ctx.format)
        dbias = round_to(rows.sum(dim=0), ctx.format) if ctx.needs_input_grad[2] else None
        return dx, dweight, dbias, None


_BF16_EXPONENT_BITS = 8


class EmulatedPrecision(MixedPrecision):
    """Mixed precision whose narrow format is emulated in FP32.

    Lightning's own class steps the loss scaler and stores its state; "autocast" is replaced.
    """

    def __init__(self, format: Format, device: str) -> None:
        needs_scaler = format.exponent_bits < _BF16_EXPONENT_BITS
        super().__init__("16-mixed" if needs_scaler else "bf16-mixed", device)
        self.format = format

    @contextmanager
    def forward_context(self) -> Generator[None, None, None]:
        """Round matrix products where mixed precision would cast their operands."""
        with EmulatedLinear(self.format):
            yield


def precision_plugins(name: str, device: torch.device) -> list[MixedPrecision]:
    """Return the plugin that makes the precision `name` true on `device`, none if Lightning's does.

    ValueError as `emulated_format`.
    """
    format = emulated_format(name)
    if format is not None:
        return [EmulatedPrecision(format, device.type)]
    return [MixedPrecision("16-mixed", device.type)] if name == "16-mixed" else []
