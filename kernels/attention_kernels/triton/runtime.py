"""Runs a Triton kernel: compiled for CUDA tensors, interpreted for CPU tensors.

The device of the first argument decides; no environment variable does. Pipeline stages change only
how many tiles wait in shared memory, and no operation. The interpreter is Triton's own, used
without TRITON_INTERPRET: that variable acts on the whole process when it imports Triton, and torch
or a user may have done so long before. Four traps:

- A jitted function refuses to be called from Python. So each kernel runs in a copy of its module's
  namespace in which the functions that it calls are interpreted too.
- BF16 is uint16 to NumPy: casts truncate, subnormals widen wrongly, `tl.dot` multiplies the raw
  integers. So 16-bit tensors are widened before (`arguments.kernel_inputs`).
- While it runs, `triton.language` is patched, so only one thread may run it.
- NumPy warns about -inf - -inf and about casts to infinity, which are ordinary here.

Leaves out what is run, and in which tile (`launch`, `fast_launch`).
"""

import functools
import threading
import types
import warnings
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.errors import OutOfResources
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction, KernelInterface

from attention_kernels.triton.arguments import Constants

__all__ = ["blocks_of", "interpret", "interpreted", "run"]

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


def blocks_of(length: int, block: int) -> int:
    """Return how many blocks hold `length` rows."""
    return (length + block - 1) // block


def run(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    *,
    device: torch.device,
    warps: int,
    stages: tuple[int, ...],
    fp_fusion: bool = False,
) -> None:
    """Run `programs` programs of a kernel on the device where its arguments are.

    Of `stages` the first is taken that fits the GPU. ValueError where none does, and for a device
    or an option that cannot be.
    """
    if device.type == "cpu":
        if fp_fusion:
            raise ValueError(
                "triton: fp_fusion must be false where kernels are interpreted, got True; "
                "only a compiler can contract a multiply and an add"
            )
        interpret(kernel, programs, arguments, constants)
    elif device.type == "cuda":
        options = {"num_warps": warps, "enable_fp_fusion": fp_fusion}
        with torch.cuda.device(device):
            _run_compiled(kernel, programs, arguments, constants, options, stages)
    else:
        raise ValueError(
            f"triton: q must be on a cpu or cuda device, got {device}; use engine='twin'"
        )


def _run_compiled(
    kernel: Any,
    programs: int,
    arguments: tuple[Any, ...],
    constants: Constants,
    options: dict[str, Any],
    stages: tuple[int, ...],
) -> None:
    if not isinstance(kernel, JITFunction):
        raise ValueError(
            "triton: CUDA tensors must be run by compiled kernels, got a process that "
            "imported Triton with TRITON_INTERPRET set; unset it or use engine='twin'"
        )
    too_large = None
    for count in stages:
        try:
            kernel[(programs,)](*arguments, N=constants, **options, num_stages=count)
            return
        except OutOfResources as error:
            too_large = error
    assert too_large is not None
    raise ValueError(
        f"triton: block_q and block_k must fit the GPU at head_dim {constants.head_dim}, "
        f"got block_q={constants.block_q}, block_k={constants.block_k} "
        f"({too_large.name}: {too_large.required} needed, {too_large.limit} there); "
        "use smaller blocks or engine='twin'"
    ) from too_large
