"""A linear layer whose three products are computed as a `LinearRecipe` says, on any device.

Each operand is rotated, quantized and dequantized, and multiplied in FP32, so a run in FP4 or FP8
is affordable where no hardware has it. What is summed is an element times its scales, rounded once
to FP32 (2**-24); a tensor core multiplies elements exactly and applies scales to partial sums. The
order of additions is another one, and what a tensor core drops while it adds is not imitated.

A block, and a rotation, that does not divide the summed axis is filled up with zeros, as kernels
pad it. Rotations are not taken back: both operands have the same one, and they cancel in the
product. Its signs are drawn once, and are those of every layer and step (arXiv 2509.25149).

Stochastic rounding draws from a key (`rounding_key`) and from where a value lies: product, operand,
row and column. So it draws the same bits again where a layer is called again at the same step.

Delayed scales are those of an update that is under way (`delayed_scaling`). Each operand of each
product has its own, though those of one tensor are equal: they follow from the same values.

Leaves out what a recipe says (`linear_recipes`).

Shape suffixes: N rows of x, all leading axes together; I inputs; O outputs; R and C any two axes.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from attention_kernels.block_scaling import dequantize, quantize
from attention_kernels.delayed_scaling import OperandScales, quantized_now
from attention_kernels.linear_recipes import LinearOperand, LinearRecipe
from attention_kernels.points import LINEAR_STREAM
from attention_kernels.random_bits import bits_after
from attention_kernels.rotation import rotation
from attention_kernels.rounding import DTYPES, round_into, round_to
from attention_kernels.rounding_key import draws_of

__all__ = ["quantized_operand", "recipe_linear"]

_SIGNS_SEED = 0
_PLACES = (
    "forward.left",
    "forward.right",
    "dgrad.left",
    "dgrad.right",
    "wgrad.left",
    "wgrad.right",
)
"""The operands, in the order of their random streams."""


class _Call(NamedTuple):
    """What decides the bits of one call besides its values: draws by their place, and scales."""

    word: int
    part: int
    first_row: int
    scales: OperandScales | None = None


def recipe_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    recipe: LinearRecipe,
    *,
    rounding_key: Sequence[int] = (),
    part: int = 0,
    scales: OperandScales | None = None,
) -> Tensor:
    """Return x w^T + bias `(..., out)` for x `(..., in)`, weight `(out, in)` and bias `(out,)`.

    The three are FP32, BF16 or FP16. The result has the dtype of `recipe.output`; the bias is added
    before it is rounded. Gradients have the dtypes of what they are of, their values those of
    `output` (dx) and `weight_gradient` (dw); dbias is summed in FP32. `rounding_key` is that of
    `flash_attention`, a `RoundingKey` and, if wanted, a `RoundingPlace`, whose `first_batch` is
    where x begins along its first axis; without it the same bits are drawn at each call. `part`
    tells the calls apart that one key is given to. `scales` are the module's delayed ones, and see
    the values of a call with gradients; without them a delayed scale is that of the values at hand.
    ValueError for another dtype.
    """
    for name, tensor in (("x", x), ("weight", weight), ("bias", bias)):
        if tensor is not None and tensor.dtype not in _TAKEN:
            raise ValueError(
                f"recipe_linear: {name} must be float32, bfloat16 or float16, got {tensor.dtype}; "
                "a recipe is computed in FP32"
            )
    draws = draws_of(0, rounding_key)
    first_row = draws.place.first_batch * prod(x.shape[1:-1])
    if scales is not None and not torch.is_grad_enabled():
        scales = scales.looked_at()  # an evaluation, or the first forward of a recomputed one
    call = _Call(draws.word, part, first_row, scales)
    return _RecipeLinear.apply(x, weight, bias, recipe, call)


_TAKEN = (torch.float32, torch.bfloat16, torch.float16)


class _RecipeLinear(torch.autograd.Function):
    """The three products of a recipe."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        recipe: LinearRecipe,
        call: _Call,
    ) -> Tensor:
        ctx.recipe, ctx.call, ctx.bias_dtype = recipe, call, bias is not None and bias.dtype
        ctx.save_for_backward(x, weight)
        x_NI = x.reshape(-1, x.shape[-1])
        with torch.autocast(x.device.type, enabled=False):
            left_NI = _operand(x_NI, 1, recipe, "forward.left", call)
            right_OI = _operand(weight, 1, recipe, "forward.right", call)
            y_NO = F.linear(left_NI, right_OI, None if bias is None else bias.float())
        y_NO = round_into(y_NO, recipe.output, DTYPES[recipe.output])
        return y_NO.reshape(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight = ctx.saved_tensors
        recipe, call = ctx.recipe, ctx.call
        dy_NO = grads[0].reshape(-1, grads[0].shape[-1])
        dx = dweight = dbias = None
        with torch.autocast(dy_NO.device.type, enabled=False):  # that of other modules may be on
            if ctx.needs_input_grad[0]:
                left_NO = _operand(dy_NO, 1, recipe, "dgrad.left", call)
                dx_NI = left_NO @ _operand(weight, 0, recipe, "dgrad.right", call)
                dx = round_into(dx_NI, recipe.output, x.dtype).reshape(x.shape)
            if ctx.needs_input_grad[1]:
                left_NO = _operand(dy_NO, 0, recipe, "wgrad.left", call)
                right_NI = _operand(x.reshape(-1, x.shape[-1]), 0, recipe, "wgrad.right", call)
                dweight = round_into(left_NO.T @ right_NI, recipe.weight_gradient, weight.dtype)
            if ctx.needs_input_grad[2]:
                dbias = dy_NO.float().sum(dim=0).to(ctx.bias_dtype)
        return dx, dweight, dbias, None, None


def _operand(x_RC: Tensor, axis: int, recipe: LinearRecipe, place: str, call: _Call) -> Tensor:
    """Return what a product that sums over `axis` multiplies in place of `x_RC`, in FP32."""
    name, side = place.split(".")
    operand: LinearOperand = getattr(getattr(recipe, name), side)
    if operand.of_forward:
        x_RC = _operand(x_RC, 1, recipe, "forward.left", call)
    return quantized_operand(x_RC, axis, operand, _PLACES.index(place), call)


def quantized_operand(
    x_RC: Tensor, axis: int, operand: LinearOperand, stream: int = 0, call: _Call | None = None
) -> Tensor:
    """Return `x_RC` rotated and quantized along `axis`, in FP32; rotated it is longer where padded.

    Zeros fill the axis up to a multiple of the rotation. `stream` is the place of the operand and
    `call` that of the product; without it stochastic rounding draws by the place of a value alone,
    and a delayed scale is that of the values at hand.
    """
    values_RC = _rotated(x_RC.float(), axis, operand.rotation)
    bits = None
    if operand.rounding == "stochastic":
        bits = _bits(values_RC, stream, call or _Call(draws_of(0).word, 0, 0))
    if operand.delayed is not None:
        return _delayed(values_RC, operand, _PLACES[stream], call, bits)
    blocks = operand.blocks
    if blocks is None:
        assert isinstance(operand.encoding, str)
        return round_to(values_RC, operand.encoding, operand.rounding, bits=bits)
    quantized = quantize(
        values_RC, blocks, axis, rounding=operand.rounding, bits=bits, partial=True
    )
    return dequantize(quantized)


def _delayed(
    x_RC: Tensor, operand: LinearOperand, place: str, call: _Call | None, bits: Tensor | None
) -> Tensor:
    """Return `x_RC` quantized by a scale of earlier updates, or by its own where none is kept."""
    assert operand.delayed is not None
    elements, rounding = operand.delayed.name, operand.rounding
    if call is None or call.scales is None:
        return quantized_now(x_RC, elements, rounding=rounding, bits=bits)
    scales = call.scales
    return scales.whole.quantized(
        scales.name(f"{place} of product {call.part}"),
        x_RC,
        elements,
        operand.history,
        rounding=rounding,
        bits=bits,
        is_gradient=place in ("dgrad.left", "wgrad.left"),
        records=scales.records,
    )


def _rotated(x_RC: Tensor, axis: int, size: int) -> Tensor:
    if not size:
        return x_RC
    columns_last = x_RC.movedim(axis, -1)
    padded = F.pad(columns_last, (0, -columns_last.shape[-1] % size))
    matrix = rotation(size, _SIGNS_SEED, x_RC.dtype, x_RC.device)
    # one product of many rows: a batch of small ones takes 3 times as long on a CPU
    rotated = padded.reshape(-1, size) @ matrix
    return rotated.reshape(padded.shape).movedim(-1, axis)


def _bits(x_RC: Tensor, stream: int, call: _Call) -> Tensor:
    """Return 32 random bits for each value, by the row in the whole batch and the column."""
    rows, columns = (torch.arange(length, device=x_RC.device) for length in x_RC.shape)
    rows_R1 = ((rows + call.first_row) & 0xFFFFFFFF)[:, None]
    return bits_after(call.word, LINEAR_STREAM, stream, call.part, rows_R1, columns)
