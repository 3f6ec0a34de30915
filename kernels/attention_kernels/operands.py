"""Operands as both flash engines receive them: rotated, scaled and rounded to their format.

What FlashAttention-3 (arXiv 2407.08608, section 3.3) does to q, k and v before its FP8 products:
incoherent processing multiplies q and k by the same orthogonal matrix M, signs times Hadamard, so
that q k^T stays and outliers spread over the head_dim; scaling divides a head, or a block of its
rows, by a factor that brings its largest magnitude onto the largest value of the format.
Or an operand is in blocks with scales of their own, as `nvfp4` is (`block_scaling`).

An operand is rounded here, before an engine runs, and the kernels read values that are on the grid
already. Published FP8 kernels read FP8 tensors; here the values are held in the narrowest of BF16,
FP16, FP32 and FP64 that has them all (`Format.container`), so that any `eXmY` runs on any chip.

Leaves out the products, and how P is scaled (`FlashNumerics.probability_scale`).

Shape suffixes: B batch, H heads, L rows, T blocks of rows, D head_dim, E head_dim up to the next
power of two.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.block_recipes import OPERAND_RECIPES, BlockRecipe
from attention_kernels.block_scaling import dequantize, quantize
from attention_kernels.formats import FORMATS, Format, format_named, input_format
from attention_kernels.numerics import FlashNumerics
from attention_kernels.points import POINTS
from attention_kernels.random_bits import bits_after
from attention_kernels.rotation import rotation
from attention_kernels.rounding import DTYPES, round_to
from attention_kernels.rounding_key import Draws, draws_of

__all__ = ["Operand", "operand_dtype", "prepare", "rotate_back"]


class Operand(NamedTuple):
    """An operand: `values` on the grid of its format, and what they are to be multiplied by.

    `values` `(B, H, L, D)` are in `Format.container`, or the caller's own tensor where nothing is
    to be done to it; `scales` is `(B, H, T)` in the work dtype, one for each block of rows, or None
    for 1.
    """

    values: Tensor
    scales: Tensor | None


def prepare(
    x: Tensor,
    name: str,
    numerics: FlashNumerics,
    block: int,
    draws: Draws | None = None,
    group: int = 1,
) -> Operand:
    """Return the operand called `name` ("q", "k", "v" or "dout") of resolved numerics.

    `x` is `(B, H, L, D)` as the caller gave it; `block` is the number of rows that share a factor
    when scaling is per block. `draws` is what stochastic rounding draws by, `group` the number of
    query heads to a head of `x`. ValueError where a factor is wanted for values that are not
    finite.
    """
    recipe = OPERAND_RECIPES.get(numerics.forward.operands)
    target = format_named(numerics.format_at(name))
    rounding, scaling = numerics.arithmetic.rounding, numerics.scaling
    rotated = scaling.incoherent and name in ("q", "k")
    # nothing to be done: the caller's own tensor, with no copy and no factors to multiply by
    if _is_kept(name, numerics, x.dtype):
        return Operand(x, None)
    work = torch.promote_types(numerics.work_dtype(), x.dtype)
    values = x.to(torch.promote_types(work, torch.float32))
    if rotated:
        # A product in the work format, which is no rounding point: its error stays with the values.
        seed = numerics.arithmetic.seed
        values = values @ rotation(x.shape[-1], seed, values.dtype, values.device)
    scales = None
    if scaling.scaling != "none":
        rows = block if scaling.scaling == "per_block" else x.shape[2]
        values, scales = _scaled(values, name, rows, target, numerics.work_dtype())
        if scaling.scaling == "per_tensor":
            # the one factor again for each block, so that engines read both scalings alike
            scales = scales.expand(*scales.shape[:2], math.ceil(x.shape[2] / block))
    bits = None
    if rounding == "stochastic":
        bits = _bits(values, name, draws or draws_of(numerics.arithmetic.seed), group)
    if recipe is not None:
        return _in_blocks(values, name, recipe, numerics, block, bits)
    values = round_to(values, target, rounding, bits=bits)
    return Operand(values.to(DTYPES[target.container]), scales)


def operand_dtype(name: str, numerics: FlashNumerics, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the operand called `name` that `prepare` makes of a tensor of `dtype`."""
    if _is_kept(name, numerics, dtype):
        return dtype
    return DTYPES[format_named(numerics.format_at(name)).container]


def _is_kept(name: str, numerics: FlashNumerics, dtype: torch.dtype) -> bool:
    """Whether a tensor of `dtype` is an operand as it is."""
    rotated = numerics.scaling.incoherent and name in ("q", "k")
    target = format_named(numerics.format_at(name))
    exact = target.changes_nothing(FORMATS[input_format(dtype)])
    return exact and not rotated and not numerics.scaled


def rotate_back(dx: Tensor, numerics: FlashNumerics) -> Tensor:
    """Return the gradient of q or k, given that of the rotated one; both in the work dtype."""
    if not numerics.scaling.incoherent:
        return dx
    # the gradient by q of q M is that by q M times M^T, which is also the inverse
    return dx @ rotation(dx.shape[-1], numerics.arithmetic.seed, dx.dtype, dx.device).T


def _in_blocks(
    values: Tensor,
    name: str,
    recipe: BlockRecipe,
    numerics: FlashNumerics,
    block: int,
    bits: Tensor | None,
) -> Operand:
    """Return elements times the scales of their blocks, and the scale of each head as its factor.

    Each head of each batch is a tensor of its own, and blocks run along the axis over which the
    forward's products add: the head_dim, and of v the keys. A product of element and scale has at
    most 8 significant bits, so BF16 holds it, down to 2**-133.
    """
    rounding = numerics.arithmetic.rounding
    axis = -2 if name == "v" else -1
    _check_finite(values, name)
    found = quantize(values, recipe, axis, rounding=rounding, bits=bits, partial=True, batch_axes=2)
    heads_BH = values.new_ones(values.shape[:2])
    if found.tensor_scale is not None:
        heads_BH = found.tensor_scale.flatten(1)
    factors_BHT = heads_BH[..., None].expand(*heads_BH.shape, math.ceil(values.shape[2] / block))
    restored = dequantize(found._replace(tensor_scale=None))
    return Operand(restored.to(DTYPES["bf16"]), factors_BHT.to(numerics.work_dtype()))


def _scaled(
    values: Tensor, name: str, rows: int, target: Format, work: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return values / factor and the factors, one for each `rows` rows.

    A factor is 1 where it would be zero, and in a format of more than 5 exponent bits: that has
    range enough, and products of its largest values would overflow.
    """
    length, largest = values.shape[2], target.max_value
    blocks = math.ceil(length / rows)
    padded = torch.nn.functional.pad(values, (0, 0, 0, blocks * rows - length))
    # The rows that fill up the last block are zeros and raise no peak.
    peaks_BHT = padded.unflatten(2, (blocks, rows)).abs().amax(dim=(-1, -2))
    _check_finite(peaks_BHT, name)
    # rounded before it divides, so that products are multiplied back by the very same factor
    scales_BHT = (peaks_BHT / largest).to(work)
    needs = (scales_BHT > 0) & (target.exponent_bits <= 5)
    scales_BHT = torch.where(needs, scales_BHT, 1.0)
    by_row = scales_BHT.repeat_interleave(rows, dim=2)[:, :, :length, None]
    # The quotient of the largest can round to just beyond the largest value.
    return (values / by_row).clamp_(-largest, largest), scales_BHT


def _check_finite(x: Tensor, name: str) -> None:
    # x - x is 0, or NaN: summed in a third of the time of looking at each element
    if not (x - x).sum().isfinite():
        raise ValueError(
            f"flash_attention: {name} must be finite when its scaling is per tensor or per block, "
            "got NaN or infinity; a factor cannot be taken from it"
        )


def _bits(values: Tensor, name: str, draws: Draws, group: int) -> Tensor:
    batches, heads, *sizes = values.shape
    rows, columns = (torch.arange(size, device=values.device) for size in sizes)
    head = draws.heads(0, batches, heads, group, values.device)
    place = head[:, :, None, None], rows[:, None], columns
    return bits_after(draws.word, POINTS[name].stream, *place)
