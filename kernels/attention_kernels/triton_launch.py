"""Launches the Triton kernels: compiled for CUDA tensors, interpreted for CPU tensors.

The device of q decides, no environment variable does. Owns launch geometry that does not decide
bits (pipeline stages); block_q and block_k do decide them and come from the numerics. Leaves out
autograd (`autograd`), checks of the arguments (`validation`) and autotuning: a block size that
timing chose would change the numbers from machine to machine.

The interpreter is Triton's own, used without TRITON_INTERPRET: that variable acts on the whole
process when it imports Triton, and torch or a user may have done so long before. Four traps:
a jitted function refuses to be called from Python, so each kernel runs in a copy of its module's
namespace in which the functions it calls are interpreted too; BF16 is uint16 to NumPy (casts
truncate, subnormals widen wrongly, `tl.dot` multiplies the raw integers), so 16-bit tensors are
widened before; while it runs, `triton.language` is patched, so only one thread may; and NumPy
warns about -inf - -inf and casts to infinity, which are ordinary here.
"""

import functools
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from attention_kernels.numerics import FlashNumerics
from attention_kernels.triton_backward import dkv_kernel, dq_kernel
from attention_kernels.triton_forward import forward_kernel

__all__ = ["backward", "compile_options", "forward", "interpreted", "kernel_constants"]

_interpreter_lock = threading.Lock()


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, numerics: FlashNumerics
) -> tuple[Tensor, Tensor]:
    """Return `(out, lse)` in the work dtype, rounded at `output` and `lse`.

    q `(batch, heads, query_len, head_dim)`, k and v `(batch, kv_heads, key_len, head_dim)`, any
    strides, unrounded; `numerics` resolved. ValueError if the blocks do not fit the GPU.
    """
    work = numerics.work_dtype()
    q, k, v = _kernel_inputs(work, q, k, v)
    out = torch.empty(q.shape, dtype=work, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=work, device=q.device)
    strides = (q.stride(), k.stride(), v.stride(), out.stride())
    points = ("operands", "scores", "statistics", "probabilities", "accumulator", "output", "lse")
    _launch(
        forward_kernel,
        _blocks(q, numerics.tiling.block_q),
        (q, k, v, out, lse, *strides, q.shape[1], q.shape[2], k.shape[2]),
        kernel_constants(q, k, causal, scale, numerics, points),
    )
    return out, lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    scale: float,
    numerics: FlashNumerics,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `(dq, dk, dv)` in the work dtype, rounded at `gradients`.

    `out` and `lse` are `forward`'s, `dout` is shaped like out; the rest as in `forward`.
    """
    work = numerics.work_dtype()
    dout, q, k, v = _kernel_inputs(work, dout, q, k, v)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    dq = torch.empty(q.shape, dtype=work, device=q.device)
    dk = torch.empty(k.shape, dtype=work, device=q.device)
    dv = torch.empty(k.shape, dtype=work, device=q.device)
    strides = (q.stride(), k.stride(), v.stride())
    dq_strides = (*strides, out.stride(), dout.stride(), dq.stride())
    dkv_strides = (*strides, dout.stride(), dk.stride())
    lengths = (q.shape[1], q.shape[2], k.shape[2])
    points = ("operands", "scores", "statistics", "dp", "ds", "gradients")
    _launch(
        dq_kernel,
        _blocks(q, numerics.tiling.block_q),
        (q, k, v, out, dout, lse, delta, dq, *dq_strides, *lengths),
        kernel_constants(q, k, causal, scale, numerics, (*points, "delta", "dq_accumulator")),
    )
    _launch(
        dkv_kernel,
        _blocks(k, numerics.tiling.block_k),
        (q, k, v, dout, lse, delta, dk, dv, *dkv_strides, *lengths),
        kernel_constants(
            q, k, causal, scale, numerics, (*points, "probabilities", "dkv_accumulator")
        ),
    )
    return dq, dk, dv


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


def _kernel_inputs(work: torch.dtype, *tensors: Tensor) -> list[Tensor]:
    """Widen 16-bit tensors, exactly, where the kernel can't read them.

    The interpreter's BF16 is no number, and Triton 3.6 and 3.7 fail to compile an FP64 dot of
    blocks that were loaded as 16 bits ("fp64 don't support largeK MMA").
    """
    widen = tensors[0].device.type == "cpu" or work == torch.float64
    detached = [tensor.detach() for tensor in tensors]
    return [
        tensor.float() if widen and tensor.element_size() == 2 else tensor for tensor in detached
    ]


def _blocks(rows: Tensor, block: int) -> int:
    return rows.shape[0] * rows.shape[1] * ((rows.shape[2] + block - 1) // block)


def kernel_constants(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float,
    numerics: FlashNumerics,
    points: tuple[str, ...],
) -> dict[str, Any]:
    """Return a kernel's compile-time arguments; `points` are the rounding points it executes."""
    formats = numerics.to_dict()
    head_dim = q.shape[3]
    return {
        "SCALE": float(scale),
        "CAUSAL": bool(causal),
        "GROUP": q.shape[1] // k.shape[1],
        "HEAD_DIM": head_dim,
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
        "BLOCK_Q": numerics.tiling.block_q,
        "BLOCK_K": numerics.tiling.block_k,
        "WORK": tl.float64 if numerics.work_dtype() == torch.float64 else tl.float32,
        **{point.upper(): formats[point] for point in points},
    }


def compile_options(kernel: Any, constants: dict[str, Any]) -> dict[str, Any]:
    """Return the compiler options that can decide bits; they depend on no device.

    A program gets 4 warps, 8 if its largest block of FP32 values would leave fewer than 64
    registers a thread to one copy of it: at 64 x 128 the forward takes 173 registers on sm_90, at
    64 x 256 it spills. FP fusion is off: a contracted multiply-add skips a rounding.
    """
    blocks = constants["BLOCK_Q"], constants["BLOCK_K"]
    rows, columns = blocks[::-1] if kernel is dkv_kernel else blocks
    accumulators = 2 if kernel is dkv_kernel else 1
    values = accumulators * rows * max(columns, constants["BLOCK_D"])
    registers = values * constants["WORK"].primitive_bitwidth // 32
    return {"num_warps": 4 if registers <= 64 * 128 else 8, "enable_fp_fusion": False}


def _launch(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    device = arguments[0].device
    if device.type == "cpu":
        _interpret(kernel, programs, arguments, constants)
    elif device.type == "cuda":
        _run_compiled(kernel, programs, arguments, constants)
    else:
        raise ValueError(
            f"triton_launch: q must be on a cpu or cuda device, got {device}; use engine='twin'"
        )


def _interpret(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    with _interpreter_lock, np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        interpreted(kernel)[(programs,)](*arguments, **constants)


def _run_compiled(
    kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any]
) -> None:
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            "triton_launch: CUDA tensors must be run by compiled kernels, got a process that "
            "imported Triton with TRITON_INTERPRET set; unset it or use engine='twin'"
        )
    options = compile_options(kernel, constants)
    # Stages only change how many tiles wait in shared memory, never an operation.
    for stages in (2, 1):
        try:
            with torch.cuda.device(arguments[0].device):
                kernel[(programs,)](*arguments, **constants, **options, num_stages=stages)
            return
        except OutOfResources as error:
            too_large = error
    raise ValueError(
        f"triton_launch: block_q and block_k must fit the GPU at head_dim {constants['HEAD_DIM']}, "
        f"got block_q={constants['BLOCK_Q']}, block_k={constants['BLOCK_K']} "
        f"({too_large.name}: {too_large.required} needed, {too_large.limit} there); "
        "use smaller blocks or engine='twin'"
    ) from too_large
