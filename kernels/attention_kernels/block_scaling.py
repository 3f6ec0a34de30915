"""Quantizes tensors in blocks that share a scale, as a `BlockRecipe` says, and dequantizes them.

`round_blocks(x, "mxfp8")` is to a block format what `round_to(x, "e4m3")` is to a format: the
result has the dtype of x, and its values are those that a tensor core would multiply. `quantize`
gives the elements and the scales apart. Nothing is packed: elements are values on the grid of their
format, in the dtype of x, which holds them all.

It computes in FP32, and in FP64 for an FP64 tensor. Operations and their order are those of torchao
0.18 (`to_mx`, `nvfp4_quantize`, `_choose_scale_float8`), so that results agree to the bit, with
these exceptions, where the scale and the elements would not fit together there:
- a block whose amax is not finite has the scale NaN, which in MX makes NaN of all its values;
  torchao makes a large number of an infinity under `floor`, `ceil`, `rceil` and `even`;
- a block of zeros has zeros, where torchao divides zero by a scale of zero;
- with the least e8m0 scale, 2**-127, elements are multiplied back by that scale; torchao divides by
  2**-126, or, under `rceil`, by 1;
- `rceil` takes the exponent from the bits. torchao takes the logarithm in FP32, which is too small
  by one for quotients just above a power of two; the hardware's conversion instruction is not;
- scales of NVFP4 have no lower end of 2**-6 (`BlockRecipe.least_scale` gives them one).

Leaves out scales from earlier steps (`delayed_scaling`) and the recipes themselves
(`block_recipes`).

Shape suffixes: R rows, C columns, S blocks of rows, T blocks of columns. Columns are the axis that
is quantized, and the last one here; further axes come before these.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.block_recipes import BlockRecipe, recipe_named
from attention_kernels.rotation import rotation
from attention_kernels.rounding import round_to

__all__ = ["Quantized", "dequantize", "quantize", "round_blocks"]

# The least and the largest exponent of e8m0 (MX v1.0, section 5.4.1), and of powers of two in FP32.
_EXPONENTS = {"e8m0": (-127, 127), "fp32": (-149, 127)}


class Quantized(NamedTuple):
    """A quantized tensor: what `dequantize` needs to give its values back.

    `elements` has the shape and dtype of the tensor and lies on the grid of the recipe's elements.
    `scales` is FP32 (FP64 of an FP64 tensor) and on the grid of the recipe's scales; each of its
    axes counts blocks, and is 1 where a block spans the axis. `tensor_scale`, by which all scales
    are multiplied, is a scalar, or with batch axes has them and axes of 1; None stands for 1.
    `seed` is that of the rotation, if the recipe has one.
    """

    elements: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    recipe: BlockRecipe
    axis: int
    seed: int


def quantize(
    x: Tensor,
    recipe: str | BlockRecipe,
    axis: int = -1,
    *,
    rounding: str = "nearest_even",
    seed: int = 0,
    bits: Tensor | None = None,
    partial: bool = False,
    batch_axes: int = 0,
) -> Quantized:
    """Quantize `x`, FP64, FP32, BF16 or FP16, in blocks along `axis`.

    `rounding` is one of `formats.ROUNDINGS` and rounds the elements; scales are rounded to nearest
    even, or as the rule of the recipe says. `seed` is that of stochastic rounding and of the signs
    of a rotation; `bits`, in the shape of `x`, are drawn already (`round_to`). Each entry of the
    first `batch_axes` axes is a tensor of its own. With `partial` the last block along an axis may
    hold fewer values; the result is that of the tensor filled up with zeros. Without it, as in
    torchao, ValueError for an axis that the block does not divide; also for an empty tensor and for
    one of another dtype.
    """
    recipe = recipe if isinstance(recipe, BlockRecipe) else recipe_named(recipe)
    x_RC = _columns_last(x, recipe, axis)
    work = torch.promote_types(x.dtype, torch.float32)
    values_RC = _rotated(x_RC.to(work), recipe, seed)
    rows, columns = _block_of(values_RC, recipe)
    if not partial:
        _check_divides(values_RC, rows, columns, recipe)
    peaks_ST = _by_block(values_RC.abs(), rows, columns, "amax")
    whole = peaks_ST.amax(tuple(range(batch_axes, x.dim())), keepdim=True)
    if recipe.block == "tensor":
        peaks_ST = whole
    tensor_scale = _tensor_scale(whole if batch_axes else whole.squeeze(), recipe)
    bits_RC = None if bits is None else bits.movedim(axis, -1)

    def attempt(largest: float) -> tuple[Tensor, Tensor]:
        scales_ST = _scales(peaks_ST, recipe, largest, tensor_scale)
        scaled_RC = _elements(values_RC, scales_ST, tensor_scale, recipe)
        return scales_ST, round_to(scaled_RC, recipe.elements, rounding, seed=seed, bits=bits_RC)

    scales_ST, elements_RC = attempt(recipe.format.max_value)
    if recipe.four_over_six:
        tried = (scales_ST, elements_RC), attempt(recipe.format.max_value * 2 / 3)
        errors = [
            _errors(values_RC, _restored(e_RC, s_ST, tensor_scale, recipe), rows, columns)
            for s_ST, e_RC in tried
        ]
        lower_ST = errors[1] < errors[0]
        scales_ST = torch.where(lower_ST, tried[1][0], scales_ST)
        lower_RC = _spread(lower_ST, values_RC.shape, rows, columns)
        elements_RC = torch.where(lower_RC, tried[1][1], elements_RC)
    elements, scales = elements_RC.to(x.dtype).movedim(-1, axis), scales_ST.movedim(-1, axis)
    return Quantized(elements, scales, tensor_scale, recipe, axis, seed)


def dequantize(quantized: Quantized) -> Tensor:
    """Return elements times scales, in the dtype of the elements; a rotation is taken back."""
    elements, scales, tensor_scale, recipe, axis, seed = quantized
    elements_RC, scales_ST = elements.movedim(axis, -1), scales.movedim(axis, -1)
    values_RC = _restored(elements_RC, scales_ST, tensor_scale, recipe)
    return _rotated(values_RC, recipe, seed, back=True).to(elements.dtype).movedim(-1, axis)


def round_blocks(
    x: Tensor,
    recipe: str | BlockRecipe,
    axis: int = -1,
    *,
    rounding: str = "nearest_even",
    seed: int = 0,
    partial: bool = False,
) -> Tensor:
    """Return `x` quantized and dequantized, in its shape and dtype; arguments as in `quantize`."""
    return dequantize(quantize(x, recipe, axis, rounding=rounding, seed=seed, partial=partial))


def _columns_last(x: Tensor, recipe: BlockRecipe, axis: int) -> Tensor:
    """Return `x` with the quantized axis last; ValueError for what can't be quantized."""
    if x.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(
            f"quantize: x must be float64, float32, bfloat16 or float16, got {x.dtype}"
        )
    needed = 2 if isinstance(recipe.block, tuple) and recipe.block[0] > 1 else 1
    if x.dim() < needed or not -x.dim() <= axis < x.dim() or not x.numel():
        raise ValueError(
            f"quantize: x must hold values along axis {axis} and have at least {needed} axes for "
            f"{recipe.name}, got shape {tuple(x.shape)}"
        )
    return x.movedim(axis, -1)


def _block_of(x_RC: Tensor, recipe: BlockRecipe) -> tuple[int, int]:
    """Return the rows and columns of a block; those of a whole tensor are joined by the caller."""
    return recipe.block if isinstance(recipe.block, tuple) else (1, x_RC.shape[-1])


def _check_divides(x_RC: Tensor, rows: int, columns: int, recipe: BlockRecipe) -> None:
    sizes = {"axis": (x_RC.shape[-1], columns)}
    if rows > 1:
        sizes["axis before it"] = (x_RC.shape[-2], rows)
    for what, (length, size) in sizes.items():
        if length % size:
            raise ValueError(
                f"quantize: the quantized {what} must be a multiple of {size} for {recipe.name}, "
                f"got {length}; pass partial=True to let the last block hold fewer"
            )


def _rotated(x_RC: Tensor, recipe: BlockRecipe, seed: int, back: bool = False) -> Tensor:
    size = recipe.rotation
    if not size:
        return x_RC
    if x_RC.shape[-1] % size:
        raise ValueError(
            f"quantize: the quantized axis must be a multiple of {size}, the size of the rotation, "
            f"got {x_RC.shape[-1]}"
        )
    matrix = rotation(size, seed, x_RC.dtype, x_RC.device)
    return (x_RC.unflatten(-1, (-1, size)) @ (matrix.T if back else matrix)).flatten(-2)


def _by_block(x_RC: Tensor, rows: int, columns: int, reduce: str) -> Tensor:
    """Return the maximum ("amax") or the sum of each block; what fills up a block is zero."""
    padding = [0, -x_RC.shape[-1] % columns]
    if rows > 1:
        padding += [0, -x_RC.shape[-2] % rows]
    padded = torch.nn.functional.pad(x_RC, padding)
    over_columns = getattr(padded.unflatten(-1, (-1, columns)), reduce)(-1)
    return (
        over_columns if rows == 1 else getattr(over_columns.unflatten(-2, (-1, rows)), reduce)(-2)
    )


def _spread(x_ST: Tensor, shape: torch.Size, rows: int, columns: int) -> Tensor:
    """Repeat each block's value for all its elements; a single value is left to broadcast."""
    if x_ST.shape[-1] > 1:
        x_ST = x_ST.repeat_interleave(columns, dim=-1)[..., : shape[-1]]
    return x_ST.repeat_interleave(rows, dim=-2)[..., : shape[-2], :] if rows > 1 else x_ST


def _tensor_scale(peaks: Tensor, recipe: BlockRecipe) -> Tensor | None:
    """Return the scale of a whole tensor, given its amax, or None; 1 for a tensor of zeros."""
    if not recipe.largest_scale:
        return None
    scale = peaks / (recipe.largest_scale * recipe.format.max_value)
    return _or_one(round_to(_finite_or_nan(scale), "fp32"))


def _scales(
    peaks_ST: Tensor, recipe: BlockRecipe, largest: float, tensor_scale: Tensor | None
) -> Tensor:
    """Return the scale of each block, on its grid, that brings amax to `largest` (rule `max`)."""
    finite_ST = _finite_or_nan(peaks_ST)
    if recipe.rule != "max":
        return _power_of_two(finite_ST, recipe)
    scales_ST = finite_ST / largest
    if tensor_scale is not None:
        scales_ST = scales_ST / tensor_scale
    scales_ST = round_to(scales_ST, "e4m3-saturate" if recipe.scales == "e4m3" else "fp32")
    scales_ST = scales_ST.clamp(min=recipe.least_scale)
    # a scale of zero in e4m3 says that the block is zero beside the others
    return scales_ST if recipe.scales == "e4m3" else _or_one(scales_ST)


def _power_of_two(peaks_ST: Tensor, recipe: BlockRecipe) -> Tensor:
    """Return the scale of each block by one of the rules that give a power of two."""
    format = recipe.format
    if recipe.rule == "rceil":
        fraction, exponent = torch.frexp(peaks_ST / format.max_value)
        exponent = exponent - (fraction == 0.5).int()
    else:
        # amax = fraction * 2**exponent, the fraction from 1/2 on
        fraction, exponent = torch.frexp(peaks_ST)
        # the half unit in the last place of an element just below 1
        beside_one = 1.0 - 2.0 ** -(format.mantissa_bits + 2)
        above = {"floor": 1.0, "even": beside_one, "ceil": 0.5}[recipe.rule]
        rises = fraction > above if recipe.rule == "ceil" else fraction >= above
        exponent = exponent - 1 + rises.int() - format.max_exponent
    exponent = exponent.clamp(*_EXPONENTS[recipe.scales])
    # Zero has no exponent: its scale is the least one of e8m0, as in torchao, or 1, as under `max`.
    exponent = exponent.where(fraction != 0, -127 if recipe.scales == "e8m0" else 0)
    # 2**exponent from the bits of FP64, which are exact where a power function need not be
    scales_ST = (exponent.long() + 1023 << 52).view(torch.float64).to(peaks_ST.dtype)
    return scales_ST.where(peaks_ST.isfinite(), torch.nan)


def _finite_or_nan(x: Tensor) -> Tensor:
    return x.where(x.isfinite(), torch.nan)


def _or_one(scales: Tensor) -> Tensor:
    return scales.where(scales != 0, 1.0)


def _elements(
    values_RC: Tensor, scales_ST: Tensor, tensor_scale: Tensor | None, recipe: BlockRecipe
) -> Tensor:
    """Return the values in units of their scale, within the range of the elements, not rounded."""
    rows, columns = _block_of(values_RC, recipe)
    if recipe.scales == "e4m3":
        # Multiplied by the reciprocal of both scales, in the order of torchao. A scale of zero
        # gives zeros; the clamp keeps zeros from becoming NaN where a reciprocal overflows.
        most = torch.finfo(values_RC.dtype).max
        inverse = 1.0 if tensor_scale is None else (1.0 / tensor_scale).clamp(max=most)
        factors_ST = (inverse / scales_ST).clamp(max=most).where(scales_ST != 0, 0.0)
        scaled_RC = values_RC * _spread(factors_ST, values_RC.shape, rows, columns)
    else:
        scaled_RC = values_RC / _spread(scales_ST, values_RC.shape, rows, columns)
    largest = recipe.format.max_value
    return scaled_RC.clamp(-largest, largest)


def _restored(
    elements_RC: Tensor, scales_ST: Tensor, tensor_scale: Tensor | None, recipe: BlockRecipe
) -> Tensor:
    """Return elements times scales, in the dtype of the scales."""
    rows, columns = _block_of(elements_RC, recipe)
    whole_ST = scales_ST if tensor_scale is None else scales_ST * tensor_scale
    spread_RC = _spread(whole_ST, elements_RC.shape, rows, columns)
    return elements_RC.to(scales_ST.dtype) * spread_RC


def _errors(values_RC: Tensor, restored_RC: Tensor, rows: int, columns: int) -> Tensor:
    """Return the sum of squared errors of each block, in FP64: close calls are then no ties."""
    return _by_block((restored_RC.double() - values_RC.double()).square(), rows, columns, "sum")
