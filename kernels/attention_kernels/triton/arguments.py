"""What a Triton kernel is handed beside q, k, v and its results.

`Constants` is what it is compiled for: numerics, which scalars and tensors of the mask there are,
the tile. A kernel reads it as `N.exp` or `N.has_left`, and each distinct value is a kernel of its
own. `Factors`, `Masks` and `Lengths` come at each launch, as named tuples, which Triton takes
apart; an absent tensor is None and compiles to nothing.

Triton compiles another kernel for an integer that is 1 or a multiple of 16, in a tuple even where
it is told not to, but for no number. So what differs from call to call, as words of random bits do
from step to step, comes in `Scalars`, as numbers: an integer as its two halves of 16 bits, which
FP32 holds. An FP64 number comes as the halves of its bits, since Triton's own scalars are FP32.

Strings are wrapped in `tl.constexpr`, since Triton 3.6 hands no bare string from a kernel to a
function that it calls. Leaves out the launch itself (`launch`).
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from attention_kernels.dropout import dropped_below, keep_word
from attention_kernels.mask_mod import block_table
from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.operands import Operand
from attention_kernels.points import POINTS, UNROUNDED
from attention_kernels.rounding_key import Draws
from attention_kernels.score_units import score_units
from attention_kernels.tensor_core_models import MODELS

__all__ = [
    "MAX_LEN",
    "Constants",
    "Factors",
    "Lengths",
    "Masks",
    "PlaceScalars",
    "Places",
    "Scalars",
    "compiled_dtype",
    "constants_of",
    "factors_of",
    "kernel_inputs",
    "lengths_of",
    "masks_of",
    "narrower",
    "places_of",
]


MAX_LEN = 2**29
"""Sequences are shorter: three lengths and two blocks add up within 31 bits."""


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Compile-time constants; `rounding`, `exp` and `dot` are wrapped strings.

    `points` holds name, format and stream of each rounding. They are part of this value, and not
    looked up in the table while a kernel compiles, because it is this value that tells Triton's
    cache of compiled kernels apart.
    """

    points: tuple[tuple[str, str, int], ...]
    rounding: Any
    exp: Any
    dot: Any
    fold: bool
    """Whether an exponent is that of 2, by one fused multiply-add (`score_units`)."""
    raw_scores: bool
    """Whether scores are kept as the product of q and k leaves them."""
    work: tl.dtype
    p_scale: float
    threshold: float
    beta: float
    tolerance: float
    moves_hidden: bool
    scale_in_ds: bool
    """Whether scale is multiplied onto P in dS, and not onto dQ and dK."""
    splits: int
    key_outer: bool
    reversed: bool
    scaled: bool
    has_softcap: bool
    has_left: bool
    has_right: bool
    has_padding: bool
    has_visible: bool
    has_blocks: bool
    has_bias: bool
    bias_shares_rows: bool
    """Whether one row of the bias serves all queries; read by the gradient of the bias alone."""
    bias_shares_keys: bool
    has_slopes: bool
    has_sinks: bool
    has_dropout: bool
    has_tensors: bool
    packed: bool
    group: int
    head_dim: int
    block_d: int
    v_head_dim: int
    """Of v, dout and out; `head_dim` is that of q and k."""
    block_v: int
    block_q: int
    block_k: int


def constants_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    bias_trained: bool = False,
) -> Constants:
    """Return the constants of a call; `numerics` is resolved.

    `bias_trained` asks for those of the kernel that computes the bias's gradient.
    With incoherent processing the gradients are rounded after they are rotated back, outside.
    """
    tiling = numerics.tiling
    for name, block in (("block_q", tiling.block_q), ("block_k", tiling.block_k)):
        if block & (block - 1):
            raise ValueError(
                f"triton: {name} must be a power of two, got {block}; use another block or "
                "engine='twin'"
            )
    if numerics.arithmetic.dot in MODELS:
        raise ValueError(
            "triton: dot must be ieee, tf32 or tf32x3, got "
            f"{numerics.arithmetic.dot!r}; kernels run on the tensor cores of the GPU at hand, and "
            "a model of some runs with engine='twin'"
        )
    left, right = narrower(mask.offsets(), q, k)
    units = score_units(numerics, mask, scale)
    points = []
    for name, point in POINTS.items():
        format = numerics.format_at(name)
        # These gradients are rounded after they are rotated back, outside.
        later = numerics.scaling.incoherent and point.field == "gradients"
        # FP64 changes nothing.
        points.append((name, "fp64" if later or format == UNROUNDED else format, point.stream))
    tensors = {
        "has_padding": mask.key_padding is not None,
        "has_visible": mask.visible is not None,
        "has_blocks": mask.mask_mod is not None,
        "has_bias": mask.bias is not None,
    }
    return Constants(
        points=tuple(points),
        **tensors,
        bias_shares_rows=bias_trained and mask.bias is not None and mask.bias.shape[2] == 1,
        bias_shares_keys=bias_trained and mask.bias is not None and mask.bias.shape[3] == 1,
        rounding=tl.constexpr(numerics.arithmetic.rounding),
        exp=tl.constexpr(numerics.softmax.power),
        dot=tl.constexpr(numerics.arithmetic.dot),
        fold=units.log2 is not None,
        raw_scores=units.natural != 1.0 or (units.log2 is not None and scale == 1.0),
        work=tl.float64 if numerics.work_dtype() == torch.float64 else tl.float32,
        p_scale=numerics.probability_scale(),
        threshold=float(numerics.softmax.rescale_threshold),
        beta=float(numerics.softmax.repeated_max_beta),
        tolerance=float(numerics.softmax.repeated_max_tolerance),
        moves_hidden=numerics.softmax.moves_hidden,
        scale_in_ds=numerics.arithmetic.gradient_scale == "probabilities",
        splits=tiling.splits,
        key_outer=tiling.loop_order == "key_outer",
        reversed=tiling.key_order == "reversed",
        scaled=numerics.scaled,
        has_softcap=mask.softcap > 0,
        has_left=left is not None,
        has_right=right is not None,
        has_slopes=mask.alibi_slopes is not None,
        has_sinks=mask.sinks is not None,
        has_dropout=mask.dropout_p > 0,
        has_tensors=any(tensors.values()),
        packed=mask.cu_seqlens_q is not None,
        group=q.shape[1] // k.shape[1],
        head_dim=q.shape[3],
        block_d=_block_of(q.shape[3]),
        v_head_dim=v.shape[3],
        block_v=_block_of(v.shape[3]),
        block_q=tiling.block_q,
        block_k=tiling.block_k,
    )


def narrower(
    offsets: tuple[int | None, int | None], q: Tensor, k: Tensor
) -> tuple[int | None, int | None]:
    """Return the offsets less those that hide nothing: added to a place they may pass 32 bits.

    Packed tensors may have more rows than any sequence, and those are shorter than `MAX_LEN`.
    """
    left, right = offsets
    if left is not None and left >= min(k.shape[2], MAX_LEN):
        left = None
    if right is not None and right >= min(q.shape[2], MAX_LEN) > 0:
        right = None
    return left, right


def _block_of(head_dim: int) -> int:
    # Blocks are powers of two, of 16 at least for tl.dot; dimensions past head_dim are 0.
    return max(16, 1 << (head_dim - 1).bit_length())


_NONE = (0, 0, 0, 0)


class Factors(NamedTuple):
    """Factors of scaled operands, `(batch, heads, blocks)` in the work dtype, or None."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    dout: Tensor | None = None


Halves = tuple[float, ...]
"""An integer as its parts of 16 bits, the highest first."""


class Scalars(NamedTuple):
    """What differs from call to call of one compiled kernel; see above."""

    scale: float | Halves
    """As the next three a number, in FP64 the four parts of its bits."""
    log2: float | Halves
    """`ScoreUnits.log2`."""
    softcap: float | Halves
    kept_scale: float | Halves
    left: Halves
    right: Halves
    dropped_below: Halves
    """A weight is dropped where its 32 random bits are below this."""
    dropout: Halves
    """The word of the call that the place of a weight is folded into."""
    rounding: Halves
    """The word that the place of a rounded value is folded into, and where q lies in the call."""
    first_batch: Halves
    first_head: Halves
    heads: Halves


class Masks(NamedTuple):
    """The tensors of a mask with their strides, None for those that are not there; the scalars."""

    padding: Tensor | None
    padding_strides: tuple[int, ...]
    visible: Tensor | None
    visible_strides: tuple[int, ...]
    table: Tensor | None
    """Of a mask_mod, as `mask_mod.block_table` says, with its tiles as bytes."""
    table_strides: tuple[int, ...]
    tiles: Tensor | None
    bias: Tensor | None
    bias_strides: tuple[int, ...]
    slopes: Tensor | None
    slopes_batch: int
    sinks: Tensor | None
    cu_q: Tensor | None
    cu_k: Tensor | None
    scalars: Scalars


class Places(NamedTuple):
    """What a mask of positions alone hands to a kernel that knows no other: the fast path's."""

    cu_q: Tensor | None
    cu_k: Tensor | None
    scalars: "PlaceScalars"


class PlaceScalars(NamedTuple):
    """The scalars of `Places`; see `Scalars`."""

    scale: float
    log2: float
    left: Halves
    right: Halves


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
    """Return what decides how many programs a launch has; reads packed offsets to the host.

    ValueError for a sequence of `MAX_LEN` or more: sums of places (`spans`) would pass 32 bits.
    """
    if mask.cu_seqlens_q is None or mask.cu_seqlens_k is None:
        found = Lengths(q.shape[0], q.shape[2], k.shape[2])
    else:
        longest = [int(x.diff().max()) for x in (mask.cu_seqlens_q, mask.cu_seqlens_k)]
        found = Lengths(len(mask.cu_seqlens_q) - 1, max(1, longest[0]), max(1, longest[1]))
    for what, length in (("query_len", found.query), ("key_len", found.key)):
        if length >= MAX_LEN:
            raise ValueError(
                f"flash_attention: {what} must be below {MAX_LEN} for the Triton kernels, got "
                f"{length}"
            )
    return found


def masks_of(
    mask: Mask, q: Tensor, k: Tensor, *, scale: float, numerics: FlashNumerics, draws: Draws
) -> Masks:
    """Return the tensors of a mask, broadcast to every head and row by strides of 0."""
    full = (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    work, tiling = numerics.work_dtype(), numerics.tiling
    table = tiles = None
    if mask.mask_mod is not None:
        blocks = (tiling.block_q, tiling.block_k)
        table, tiles = block_table(mask.mask_mod, *full[2:], *blocks, q.device)
        table, tiles = table.expand(*full[:2], -1, -1), tiles.view(torch.uint8)
    padding, visible, bias, slopes = mask.key_padding, mask.visible, mask.bias, mask.alibi_slopes
    # bool is read as bytes; strides of 0 broadcast, so that no mask is ever copied to full size.
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
        table,
        _NONE if table is None else table.stride(),
        tiles,
        bias,
        _NONE if bias is None else bias.stride(),
        None if slopes is None else slopes.contiguous(),
        0 if slopes is None or len(slopes) == 1 else q.shape[1],
        None if mask.sinks is None else kernel_inputs(work, mask.sinks)[0].contiguous(),
        mask.cu_seqlens_q,
        mask.cu_seqlens_k,
        _scalars_of(mask, q, k, scale, numerics, draws),
    )


def places_of(mask: Mask, q: Tensor, k: Tensor, *, scale: float, numerics: FlashNumerics) -> Places:
    """Return what the fast path's kernels read of a mask; they work in FP32."""
    left, right = narrower(mask.offsets(), q, k)
    log2 = score_units(numerics, mask, scale).log2 or 1.0
    scalars = PlaceScalars(float(scale), log2, _halves(left or 0, 2), _halves(right or 0, 2))
    return Places(mask.cu_seqlens_q, mask.cu_seqlens_k, scalars)


def _scalars_of(
    mask: Mask, q: Tensor, k: Tensor, scale: float, numerics: FlashNumerics, draws: Draws
) -> Scalars:
    left, right = narrower(mask.offsets(), q, k)
    word = keep_word(mask.dropout_seed, mask.dropout_offset) if mask.dropout_p else 0
    log2 = score_units(numerics, mask, scale).log2 or 1.0
    scale_, log2, softcap, kept_scale = (
        float(x) if numerics.work_dtype() == torch.float32 else _halves(_bits_of(x), 4)
        for x in (scale, log2, mask.softcap, mask.kept_scale())
    )
    place = draws.place._replace(heads=draws.place.heads or q.shape[1])
    integers = (left or 0, right or 0, dropped_below(mask.dropout_p), word, draws.word, *place)
    return Scalars(scale_, log2, softcap, kept_scale, *(_halves(x, 2) for x in integers))


def _bits_of(x: float) -> int:
    return struct.unpack("<q", struct.pack("<d", x))[0]


def _halves(x: int, count: int) -> Halves:
    return tuple(float(x >> 16 * at & 0xFFFF) for at in reversed(range(count)))


def kernel_inputs(work: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Widen 16-bit tensors, exactly, where the kernel can't read them.

    The interpreter's BF16 is no number, and Triton 3.6 and 3.7 fail to compile an FP64 dot of
    blocks that were loaded as 16 bits ("fp64 don't support largeK MMA").
    """
    interpreted = tensors[0].device.type == "cpu"
    return [x.detach().to(_widened(x.dtype, work, interpreted)) for x in tensors]


def compiled_dtype(dtype: torch.dtype, work: torch.dtype) -> torch.dtype:
    """Return the dtype in which a compiled kernel reads a tensor; see `kernel_inputs`."""
    return _widened(dtype, work, False)


def _widened(dtype: torch.dtype, work: torch.dtype, interpreted: bool) -> torch.dtype:
    widen = interpreted or work == torch.float64
    return torch.float32 if widen and dtype.itemsize == 2 else dtype
