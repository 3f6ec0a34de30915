"""A precision's name as what Lightning's Trainer takes: PyTorch's own, a loss scaler, or emulation.

Lightning replaces `16-mixed` on a CPU by `bf16-mixed` and only warns (2.6.6); here FP16 is FP16,
with PyTorch's loss scaler, on every device. `emulated:<format>` trains FP32 weights whose matrix
products are rounded to the format; formats with a range below BF16's get the loss scaler too.
Leaves out the names themselves (`config.precision`).
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from attention_kernels import Format
from stability.config.precision import emulated_format
from stability.model.emulated_linear import EmulatedLinear

__all__ = ["EmulatedPrecision", "precision_plugins"]

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
        """Round matrix products instead of casting their operands."""
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
