"""What the kernels are handed at a launch beside q, k, v and results: factors, masks, lengths.

Named tuples, which Triton takes apart; an absent tensor is None and compiles to nothing. Leaves out
what is known when a kernel is compiled (`triton_constants`) and the launch (`triton_launch`).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.masks import Mask
from attention_kernels.operands import Operand

__all__ = ["Factors", "Lengths", "Masks", "factors_of", "kernel_inputs", "lengths_of", "masks_of"]

_NONE = (0, 0, 0, 0)


class Factors(NamedTuple):
    """Factors of scaled operands, `(batch, heads, blocks)` in the work dtype, or None."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    dout: Tensor | None = None


class Masks(NamedTuple):
    """The tensors of a mask with their strides; None for those that are not there."""

    padding: Tensor | None
    padding_strides: tuple[int, ...]
    visible: Tensor | None
    visible_strides: tuple[int, ...]
    bias: Tensor | None
    bias_strides: tuple[int, ...]
    slopes: Tensor | None
    slopes_batch: int
    cu_q: Tensor | None
    cu_k: Tensor | None


class Lengths(NamedTuple):
    """How many sequences there are, and the longest query and key lengths among them."""

    batches: int
    query: int
    key: int


def factors_of(operands: Sequence[Operand]) -> Factors:
    """Return the factors of q, k, v and, if given, dout, laid out as the kernels read them."""
    scales = (operand.scales for operand in operands)
    return Factors(*(None if x is None else x.contiguous() for x in scales))


def lengths_of(mask: Mask, q: Tensor, k: Tensor) -> Lengths:
    """Return what decides how many programs a launch has; reads packed offsets to the host."""
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        return Lengths(q.shape[0], q.shape[2], k.shape[2])
    longest = [int(x.diff().max()) for x in (mask.cu_seqlens_q, mask.cu_seqlens_k)]
    return Lengths(len(mask.cu_seqlens_q) - 1, max(1, longest[0]), max(1, longest[1]))


def masks_of(mask: Mask, q: Tensor, k: Tensor) -> Masks:
    """Return the tensors of a mask, broadcast to every head and row by strides of 0."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    padding, visible, bias, slopes = mask.key_padding, mask.visible, mask.bias, mask.alibi_slopes
    if padding is not None:
        padding = padding[:, None, None].view(torch.uint8).expand(full)
    if visible is not None:
        visible = visible.view(torch.uint8).expand(full)
    if bias is not None:
        (bias,) = kernel_inputs(bias.dtype, bias)
        bias = bias.expand(full)
    return Masks(
        padding,
        _NONE if padding is None else padding.stride(),
        visible,
        _NONE if visible is None else visible.stride(),
        bias,
        _NONE if bias is None else bias.stride(),
        None if slopes is None else slopes.contiguous(),
        0 if slopes is None or len(slopes) == 1 else q.shape[1],
        mask.cu_seqlens_q,
        mask.cu_seqlens_k,
    )


def kernel_inputs(work: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Widen 16-bit tensors, exactly, where the kernel can't read them.

    The interpreter's BF16 is no number, and Triton 3.6 and 3.7 fail to compile an FP64 dot of
    blocks that were loaded as 16 bits ("fp64 don't support largeK MMA").
    """
    widen = tensors[0].device.type == "cpu" or work == torch.float64
    detached = [tensor.detach() for tensor in tensors]
    return [
        tensor.float() if widen and tensor.element_size() == 2 else tensor for tensor in detached
    ]
