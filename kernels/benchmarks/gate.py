"""No speed without right results: each attention is held to flash-attn's budget first."""

import torch
from registry import GATE_SHAPE, draw

from attention_kernels import attention
from attention_kernels.testing import assert_within_budget, with_gradients

__all__ = ["gate"]

FACTORS = {"flash:all_bf16": 8.0}
"""Over the baseline's error; 3 for all others. Sums kept in BF16 err more: that is the point."""


def gate(device: str, names: list[str], forward_only: tuple[str, ...] = ()) -> None:
    """Raise AssertionError naming the first that is wrong, causal or not, forward or backward."""
    inputs = draw(GATE_SHAPE, device)
    tensors = [x.detach() for x in (inputs.q, inputs.k, inputs.v, inputs.dout)]
    for causal in (False, True):
        wide = [x.double() for x in tensors]
        exact = with_gradients(attention, *wide, implementation="golden", causal=causal)
        plain = with_gradients(attention, *tensors, implementation="baseline:plain", causal=causal)
        for name in names:
            found = _run(name, tensors, causal, name in forward_only)
            for what, value in found.items():
                factor = FACTORS.get(name, 3.0)
                assert_within_budget(value, plain[what], exact[what], factor, f"{name} {what}")


def _run(
    name: str, tensors: list[torch.Tensor], causal: bool, forward_only: bool
) -> dict[str, torch.Tensor]:
    options = {"implementation": name, "causal": causal}
    if forward_only:
        with torch.no_grad():
            return {"out": attention(*tensors[:3], **options)}
    return with_gradients(attention, *tensors, **options)
