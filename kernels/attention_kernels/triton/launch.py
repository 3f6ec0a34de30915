"""Runs the Triton kernels: compiled for CUDA tensors, interpreted for CPU tensors.

The device of q decides; no environment variable does. Two things here could decide bits and do not.
Pipeline stages change only how many tiles wait in shared memory. Tiles are never autotuned: a block
size that timing chose would change the numbers from machine to machine, so `block_q` and `block_k`
come from the numerics, and blocks that do not fit are refused.

The interpreter is Triton's own, used without TRITON_INTERPRET: that variable acts on the whole
process when it imports Triton, and torch or a user may have done so long before. Four traps:

- A jitted function refuses to be called from Python. So each kernel runs in a copy of its module's
  namespace in which the functions that it calls are interpreted too.
- BF16 is uint16 to NumPy: casts truncate, subnormals widen wrongly, `tl.dot` multiplies the raw
  integers. So 16-bit tensors are widened before (`arguments.kernel_inputs`).
- While it runs, `triton.language` is patched, so only one thread may run it.
- NumPy warns about -inf - -inf and about casts to infinity, which are ordinary here.

Leaves out autograd (`operators`) and checks of the arguments (`checks`).
"""

import functools
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from attention_kernels.masks import Mask
from attention_kernels.numerics import FlashNumerics
from attention_kernels.operands import Operand, prepare, rotate_back
from attention_kernels.points import POINTS
from attention_kernels.random_bits import bits_after
from attention_kernels.rounding import round_to
from attention_kernels.rounding_key import Draws, draws_of
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
from attention_kernels.triton.forward import forward_kernel, merge_kernel

__all__ = ["backward", "compile_options", "forward", "interpret", "interpreted"]

_interpreter_lock = threading.Lock()


def interpret(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: Constants) -> None:
    """Run `programs` programs of a kernel, one after the other."""
    with _interpreter_lock, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreted(kernel)[(programs,)](*arguments, N=constants)


@functools.cache
def interpreted(kernel: KernelInterface) -> InterpretedFunction:
    """Return the same kernel for Triton's interpreter, and with it every function it calls."""
    return InterpretedFunction(_in_interpreted_namespace(kernel, {}))


def _in_interpreted_namespace(
    function: Any, namespaces: dict[int, dict[str, Any]]
) -> types.FunctionType:
    source = function.fn
    module = id(source.__globals__)
    if module not in namespaces:
        namespace = namespaces[module] = dict(source.__globals__)
        for name, value in source.__globals__.items():
            if isinstance(value, KernelInterface):
                inner = _in_interpreted_namespace(value, namespaces)
                namespace[name] = InterpretedFunction(inner).rewrite()
            elif name == "COMPILED":
                namespace[name] = False
        namespace["range"] = _interpreted_range
    return types.FunctionType(
        source.__code__, namespaces[module], source.__name__, source.__defaults__
    )


def _interpreted_range(*bounds: Any) -> range:
    """Loop bounds as integers; Triton 3.6 fails to make them with NumPy 2.5, 3.7 does not."""
    return range(*(b.handle.data.item() if isinstance(b, tl.tensor) else b for b in bounds))


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
    """Return `(out, lse)` in the work dtype, rounded at `output` and `lse`.

    q `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`, v and
    out perhaps of another head_dim, any strides, unrounded; `numerics` resolved. Without `draws`
    stochastic rounding draws by their seed. ValueError if the blocks do not fit the GPU.
    """
    work, tiling = numerics.work_dtype(), numerics.tiling
    draws = draws or draws_of(numerics.arithmetic.seed)
    constants = constants_of(q, k, v, mask=mask, numerics=numerics)
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
    blocks = _blocks(lengths.query, tiling.block_q) * heads * lengths.batches
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
    """Return `(dq, dk, dv, dsinks, dbias)` in the work dtype, three rounded at `gradients`.

    `dbias`, shaped as the bias, is computed where `bias_trained`.
    `out` and `lse` are `forward`'s, `dout` is shaped like out; the rest as in `forward`.
    """
    work, tiling = numerics.work_dtype(), numerics.tiling
    draws = draws or draws_of(numerics.arithmetic.seed)
    constants = constants_of(q, k, v, mask=mask, numerics=numerics)
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
    lse, out = lse.contiguous(), out.detach()
    delta = torch.empty_like(lse)
    make = torch.zeros if constants.packed else torch.empty
    dq, dk, dv = (make(x.shape, dtype=work, device=q.device) for x in (q, k, v))
    strides = (q_.stride(), k_.stride(), v_.stride())
    _launch(
        dq_kernel,
        _blocks(lengths.query, tiling.block_q) * heads * lengths.batches,
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
        _blocks(lengths.key, tiling.block_k) * kv_heads * lengths.batches,
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
        constants = constants_of(q, k, v, mask=mask, numerics=numerics, bias_trained=True)
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
        _blocks(query_len, constants.block_q),
        _blocks(key_len, constants.block_k),
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


def _blocks(length: int, block: int) -> int:
    return (length + block - 1) // block


def compile_options(kernel: Any, constants: Constants, fp_fusion: bool = False) -> dict[str, Any]:
    """Return the compiler options that can decide bits; they depend on no device.

    A program gets 4 warps, 8 if its largest block of FP32 values would leave fewer than 64
    registers a thread to one copy of it: at 64 x 256 the forward spills on sm_90 otherwise. dK and
    dV are two sums beside two tiles, and get 8: with 4 they spill on sm_100. So does the gradient
    of a bias, a sum of tiles: with 4 it spills on sm_90. FP fusion is off unless asked: a
    contracted multiply-add skips a rounding.
    """
    columns = max(constants.block_k, constants.block_d, constants.block_v)
    values = constants.block_q * columns
    registers = values * constants.work.primitive_bitwidth // 32
    many = kernel in (dkv_kernel, dbias_kernel) or registers > 64 * 128
    return {"num_warps": 8 if many else 4, "enable_fp_fusion": fp_fusion}


def _launch(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    fp_fusion: bool = False,
) -> None:
    device = arguments[0].device
    if device.type == "cpu":
        if fp_fusion:
            raise ValueError(
                "triton: fp_fusion must be false where kernels are interpreted, got True; "
                "only a compiler can contract a multiply and an add"
            )
        interpret(kernel, programs, arguments, constants)
    elif device.type == "cuda":
        _run_compiled(kernel, programs, arguments, constants, fp_fusion)
    else:
        raise ValueError(
            f"triton: q must be on a cpu or cuda device, got {device}; use engine='twin'"
        )


def _run_compiled(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    fp_fusion: bool = False,
) -> None:
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            "triton: CUDA tensors must be run by compiled kernels, got a process that "
            "imported Triton with TRITON_INTERPRET set; unset it or use engine='twin'"
        )
    options = compile_options(kernel, constants, fp_fusion)
    # Stages only change how many tiles wait in shared memory, never an operation.
    for stages in (2, 1):
        try:
            with torch.cuda.device(arguments[0].device):
                kernel[(programs,)](*arguments, N=constants, **options, num_stages=stages)
            return
        except OutOfResources as error:
            too_large = error
    raise ValueError(
        f"triton: block_q and block_k must fit the GPU at head_dim {constants.head_dim}, "
        f"got block_q={constants.block_q}, block_k={constants.block_k} "
        f"({too_large.name}: {too_large.required} needed, {too_large.limit} there); "
        "use smaller blocks or engine='twin'"
    ) from too_large
