"""Launches the dialled Triton kernels: any numerics, any mask.

Tiles are never autotuned: a block size that timing chose would change the numbers from machine to
machine, so `block_q` and `block_k` come from the numerics, and blocks that do not fit are refused.
Calls that the fast path takes are handed on to it (`fast_launch`); `dialled_forward` and
`dialled_backward` are the reference that it is held against.

Leaves out autograd (`operators`), checks of the arguments (`checks`) and how a kernel is run
(`runtime`).
"""

from typing import Any

import torch
from torch import Tensor

from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.operands import Operand, prepare, rotate_back
from attention_kernels.points import POINTS
from attention_kernels.random_bits import bits_after
from attention_kernels.rounding import round_to
from attention_kernels.rounding_key import Draws, draws_of
from attention_kernels.triton import fast_launch
from attention_kernels.triton.arguments import (
    Constants,
    Factors,
    Masks,
    constants_of,
    factors_of,
    kernel_inputs,
    lengths_of,
    masks_of,
)
from attention_kernels.triton.backward import dbias_kernel, dkv_kernel, dq_kernel
from attention_kernels.triton.fast_launch import applies
from attention_kernels.triton.forward import forward_kernel, merge_kernel
from attention_kernels.triton.runtime import blocks_of, run

__all__ = ["STAGES", "backward", "dialled_backward", "dialled_forward", "forward", "warps_of"]


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)`, rounded at `output` and `lse`, by the fast path or the dialled kernels.

    q `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`, v and
    out perhaps of another head_dim, any strides, unrounded; `numerics` resolved. `lse` is in the
    work dtype, out too or, where that holds it, in q's. Without `draws` stochastic rounding draws
    by their seed. ValueError if the blocks do not fit the GPU.
    """
    if applies(q, k, v, mask=mask, scale=scale, numerics=numerics):
        return fast_launch.forward(q, k, v, mask=mask, scale=scale, numerics=numerics)
    return dialled_forward(q, k, v, mask=mask, scale=scale, numerics=numerics, draws=draws)


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
    bias_trained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return `(dq, dk, dv, dsinks, dbias)`, the first three rounded at `gradients`.

    They are in the work dtype or, where that holds them, in q's. `dbias`, shaped as the bias, is
    computed where `bias_trained`. `out` and `lse` are `forward`'s, `dout` is shaped like out; the
    rest as in `forward`.
    """
    options = {"mask": mask, "scale": scale, "numerics": numerics}
    if applies(q, k, v, **options):
        return *fast_launch.backward(dout, q, k, v, out, lse, **options), None, None
    options |= {"draws": draws, "bias_trained": bias_trained}
    return dialled_backward(dout, q, k, v, out, lse, **options)


def dialled_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
) -> tuple[Tensor, Tensor]:
    """Return what `forward` does, in the work dtype, by the dialled kernels."""
    work, tiling = numerics.work_dtype(), numerics.tiling
    draws = draws or draws_of(numerics.arithmetic.seed)
    constants = constants_of(q, k, v, mask=mask, scale=scale, numerics=numerics)
    lengths = lengths_of(mask, q, k)
    masks = masks_of(mask, q, k, scale=scale, numerics=numerics, draws=draws)
    heads, query_rows, key_rows = q.shape[1], q.shape[2], k.shape[2]
    operands = [
        prepare(x, name, numerics, block, draws, q.shape[1] // x.shape[1])
        for x, name, block in (
            (q, "q", tiling.block_q),
            (k, "k", tiling.block_k),
            (v, "v", tiling.block_k),
        )
    ]
    q_, k_, v_ = kernel_inputs(work, *(operand.values for operand in operands))
    factors = factors_of(operands)
    # Rows of packed tensors that are in no sequence are nobody's program to write.
    make = torch.zeros if constants.packed else torch.empty
    parts = tiling.splits * q.shape[0]
    out = make((parts, *q.shape[1:3], v.shape[3]), dtype=work, device=q.device)
    lse = torch.full((parts, *q.shape[1:3]), -torch.inf, dtype=work, device=q.device)
    strides = (q_.stride(), k_.stride(), v_.stride(), out.stride())
    blocks = blocks_of(lengths.query, tiling.block_q) * heads * lengths.batches
    counts = (lengths.batches, heads, lengths.query, query_rows)
    _launch(
        forward_kernel,
        blocks * tiling.splits,
        (q_, k_, v_, out, lse, *strides, factors, masks, *counts, key_rows),
        constants,
        numerics.arithmetic.fp_fusion,
    )
    if tiling.splits == 1:
        return out, lse
    merged = make((*q.shape[:3], v.shape[3]), dtype=work, device=q.device)
    merged_lse = torch.full_like(lse[: q.shape[0]], -torch.inf)
    arguments = (out, lse, merged, merged_lse, out.stride(), merged.stride(), masks, *counts)
    _launch(merge_kernel, blocks, arguments, constants, numerics.arithmetic.fp_fusion)
    return merged, merged_lse


def dialled_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    mask: Mask,
    scale: float,
    numerics: FlashNumerics,
    draws: Draws | None = None,
    bias_trained: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return what `backward` does, in the work dtype, by the dialled kernels."""
    work, tiling = numerics.work_dtype(), numerics.tiling
    draws = draws or draws_of(numerics.arithmetic.seed)
    constants = constants_of(q, k, v, mask=mask, scale=scale, numerics=numerics)
    lengths = lengths_of(mask, q, k)
    masks = masks_of(mask, q, k, scale=scale, numerics=numerics, draws=draws)
    heads, kv_heads, query_rows, key_rows = q.shape[1], k.shape[1], q.shape[2], k.shape[2]
    rows_of = {
        "q": tiling.block_q,
        "dout": tiling.block_q,
        "k": tiling.block_k,
        "v": tiling.block_k,
    }
    operands: dict[str, Operand] = {
        name: prepare(x, name, numerics, rows_of[name], draws, q.shape[1] // x.shape[1])
        for name, x in (("q", q), ("k", k), ("v", v), ("dout", dout))
    }
    q_, k_, v_, dout_ = kernel_inputs(work, *(operand.values for operand in operands.values()))
    factors = factors_of(list(operands.values()))
    # dq_kernel leaves delta behind for dkv_kernel, which is launched after it on the same stream.
    lse, out = lse.contiguous(), out.detach().to(work)
    delta = torch.empty_like(lse)
    make = torch.zeros if constants.packed else torch.empty
    dq, dk, dv = (make(x.shape, dtype=work, device=q.device) for x in (q, k, v))
    strides = (q_.stride(), k_.stride(), v_.stride())
    _launch(
        dq_kernel,
        blocks_of(lengths.query, tiling.block_q) * heads * lengths.batches,
        (
            *(q_, k_, v_, out, dout_, lse, delta, dq),
            *(*strides, out.stride(), dout_.stride(), dq.stride(), factors, masks),
            *(heads, lengths.query, query_rows, key_rows),
        ),
        constants,
        numerics.arithmetic.fp_fusion,
    )
    _launch(
        dkv_kernel,
        blocks_of(lengths.key, tiling.block_k) * kv_heads * lengths.batches,
        (
            *(q_, k_, v_, dout_, lse, delta, dk, dv),
            *(*strides, dout_.stride(), dk.stride(), dv.stride(), factors, masks),
            *(heads, lengths.key, query_rows, key_rows),
        ),
        constants,
        numerics.arithmetic.fp_fusion,
    )
    dsinks, dbias = _sink_gradient(mask, lse, delta), None
    if bias_trained and mask.bias is not None:
        inputs = (q_, k_, v_, dout_, lse, delta)
        constants = constants_of(
            q, k, v, mask=mask, scale=scale, numerics=numerics, bias_trained=True
        )
        dbias = _bias_gradient(inputs, factors, masks, constants, mask.bias, numerics)
    if not numerics.scaling.incoherent:
        return dq, dk, dv, dsinks, dbias
    rotated = {"dq": rotate_back(dq, numerics), "dk": rotate_back(dk, numerics), "dv": dv}
    dq, dk, dv = (
        _round_gradient(x, name, mask, (q, k), numerics, draws) for name, x in rotated.items()
    )
    return dq, dk, dv, dsinks, dbias


def _bias_gradient(
    inputs: tuple[Tensor, ...],
    factors: Factors,
    masks: Masks,
    constants: Constants,
    bias: Tensor,
    numerics: FlashNumerics,
) -> Tensor:
    """Return the gradient of the bias, shaped as it is, of q, k, v, dout, lse and delta."""
    batches, heads, query_len, key_len = *inputs[4].shape, inputs[1].shape[2]
    bias_batches, bias_heads = bias.shape[:2]
    q_blocks, k_blocks = (
        blocks_of(query_len, constants.block_q),
        blocks_of(key_len, constants.block_k),
    )
    rows = q_blocks if constants.bias_shares_rows else query_len
    keys = k_blocks if constants.bias_shares_keys else key_len
    dbias = inputs[4].new_empty((bias_batches, bias_heads, rows, keys))
    strides = (*(x.stride() for x in inputs[:4]), dbias.stride())
    counts = (batches, heads, bias_batches, bias_heads, query_len, key_len)
    _launch(
        dbias_kernel,
        q_blocks * k_blocks * bias_heads * bias_batches,
        (*inputs, dbias, *strides, factors, masks, *counts),
        constants,
        numerics.arithmetic.fp_fusion,
    )
    # torch adds the sums of the tiles in one order
    if constants.bias_shares_rows:
        dbias = dbias.sum(dim=2, keepdim=True)
    return dbias.sum(dim=3, keepdim=True) if constants.bias_shares_keys else dbias


def _sink_gradient(mask: Mask, lse_BHQ: Tensor, delta_BHQ: Tensor) -> Tensor | None:
    """Return -sum(exp(sink - lse) delta) of each head: torch adds in one order, atomics do not."""
    if mask.sinks is None:
        return None
    sinks_H1 = mask.sinks.detach().to(lse_BHQ.dtype)[:, None]
    return -(torch.exp(sinks_H1 - lse_BHQ) * delta_BHQ).sum(dim=(0, 2))


def _round_gradient(
    x: Tensor,
    name: str,
    mask: Mask,
    of: tuple[Tensor, Tensor],
    numerics: FlashNumerics,
    draws: Draws,
) -> Tensor:
    """Round a gradient as the kernels would, had they the rotated one; rows are a sequence's."""
    format, arithmetic = numerics.backward.gradients, numerics.arithmetic
    if arithmetic.rounding != "stochastic":
        return round_to(x, format, arithmetic.rounding)
    batches, heads = x.shape[:2]
    dim = torch.arange(x.shape[3], device=x.device)
    for sequence in mask.sequences(of[0].shape[2], of[1].shape[2]):
        lines = sequence.queries if name == "dq" else sequence.keys
        n = draws.heads(sequence.index, batches, heads, of[0].shape[1] // heads, x.device)
        row = torch.arange(len(lines), device=x.device)
        place = n[:, :, None, None], row[:, None], dim
        bits = bits_after(draws.word, POINTS[name].stream, 0, *place)
        part = x[:, :, lines.start : lines.stop]
        part.copy_(round_to(part, format, "stochastic", bits=bits))
    return x


STAGES = (2, 1)
"""Tiles that wait in shared memory: the second number where the first does not fit."""


def warps_of(kernel: Any, constants: Constants) -> int:
    """Return how many warps run a program of a dialled kernel; it depends on no device.

    4, or 8 if its largest block of FP32 values would leave fewer than 64 registers a thread to one
    copy of it: at 64 x 256 the forward spills on sm_90 otherwise. dK and dV are two sums beside two
    tiles, and get 8: with 4 they spill on sm_100. So does the gradient of a bias, a sum of tiles:
    with 4 it spills on sm_90.
    """
    columns = max(constants.block_k, constants.block_d, constants.block_v)
    values = constants.block_q * columns
    registers = values * constants.work.primitive_bitwidth // 32
    many = kernel in (dkv_kernel, dbias_kernel) or registers > 64 * 128
    return 8 if many else 4


def _launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    fp_fusion: bool = False,
) -> None:
    run(
        kernel,
        programs,
        arguments,
        constants,
        device=arguments[0].device,
        warps=warps_of(kernel, constants),
        stages=STAGES,
        fp_fusion=fp_fusion,
    )
