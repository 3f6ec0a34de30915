"""What a Triton kernel is compiled for: one value that holds every compile-time constant.

The numerics, the mask's scalars, which of its tensors there are, and the tile. A kernel reads it as
`N.scores`, `N.causal`; each distinct value is a kernel of its own. Strings are wrapped, since
Triton 3.6 hands no bare string from a kernel to a function it calls. Leaves out pointers, strides
and lengths, which a kernel gets when it is launched (`triton_launch`).
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
import triton.language as tl

from attention_kernels.masks import Mask
from attention_kernels.numerics import BackwardNumerics, FlashNumerics, ForwardNumerics

__all__ = ["Constants", "constants_of"]


@dataclass(frozen=True, kw_only=True)
class Constants:
    """Compile-time constants; formats, `rounding`, `exp` and `dot` are wrapped strings."""

    scores: Any
    statistics: Any
    probabilities: Any
    accumulator: Any
    output: Any
    lse: Any
    delta: Any
    dp: Any
    ds: Any
    dq_accumulator: Any
    dkv_accumulator: Any
    gradients: Any
    rounding: Any
    exp: Any
    dot: Any
    work: tl.dtype
    seed: int
    p_scale: float
    threshold: float
    beta: float
    splits: int
    key_outer: bool
    reversed: bool
    scaled: bool
    scale: float
    softcap: float
    has_left: bool
    has_right: bool
    left: int
    right: int
    has_padding: bool
    has_visible: bool
    has_bias: bool
    has_slopes: bool
    has_tensors: bool
    packed: bool
    group: int
    head_dim: int
    block_d: int
    block_q: int
    block_k: int


def constants_of(
    q: torch.Tensor, k: torch.Tensor, mask: Mask, scale: float, numerics: FlashNumerics
) -> Constants:
    """Return the constants of a call; `numerics` is resolved.

    With incoherent processing the gradients are rounded after they are rotated back, outside.
    """
    left, right = mask.offsets()
    points = [*fields(ForwardNumerics), *fields(BackwardNumerics)]
    flat = numerics.to_dict()
    formats = {p.name: tl.constexpr(flat[p.name]) for p in points if p.name != "operands"}
    if numerics.scaling.incoherent:
        formats["gradients"] = tl.constexpr("fp64")
    tensors = {
        "has_padding": mask.key_padding is not None,
        "has_visible": mask.visible is not None,
        "has_bias": mask.bias is not None,
    }
    head_dim = q.shape[3]
    return Constants(
        **formats,
        **tensors,
        rounding=tl.constexpr(numerics.arithmetic.rounding),
        exp=tl.constexpr(numerics.softmax.exp),
        dot=tl.constexpr(numerics.arithmetic.dot),
        work=tl.float64 if numerics.work_dtype() == torch.float64 else tl.float32,
        seed=numerics.arithmetic.seed,
        p_scale=numerics.probability_scale(),
        threshold=float(numerics.softmax.rescale_threshold),
        beta=float(numerics.softmax.repeated_max_beta),
        splits=numerics.tiling.splits,
        key_outer=numerics.tiling.loop_order == "key_outer",
        reversed=numerics.tiling.key_order == "reversed",
        scaled=numerics.scaling.scaling != "none",
        scale=float(scale),
        softcap=float(mask.softcap),
        has_left=left is not None,
        has_right=right is not None,
        left=left or 0,
        right=right or 0,
        has_slopes=mask.alibi_slopes is not None,
        has_tensors=any(tensors.values()),
        packed=mask.cu_seqlens_q is not None,
        group=q.shape[1] // k.shape[1],
        head_dim=head_dim,
        block_d=max(16, 1 << (head_dim - 1).bit_length()),
        block_q=numerics.tiling.block_q,
        block_k=numerics.tiling.block_k,
    )
