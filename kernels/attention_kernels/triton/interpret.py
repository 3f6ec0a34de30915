"""Runs a kernel in Triton's own interpreter, for tensors on a CPU, whatever the environment says.

Used without TRITON_INTERPRET: that variable acts on the whole process when it imports Triton, and
torch or a user may have done so long before. Four traps: a jitted function refuses to be called
from Python, so each kernel runs in a copy of its module's namespace in which the functions it calls
are interpreted too; BF16 is uint16 to NumPy (casts truncate, subnormals widen wrongly, `tl.dot`
multiplies the raw integers), so 16-bit tensors are widened before; while it runs, `triton.language`
is patched, so only one thread may; and NumPy warns about -inf - -inf and casts to infinity, which
are ordinary here. Leaves out which kernels there are and their arguments (`triton_launch`).
"""

import functools
import threading
import types
import warnings
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import KernelInterface

from attention_kernels.triton.constants import Constants

__all__ = ["interpret", "interpreted"]

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
