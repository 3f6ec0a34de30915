"""Any module's own code in FP64: where it asks for a narrower dtype it gets FP64.

Parameters, buffers and inputs in FP64 are not enough: a norm that computes in FP32 by `.float()`,
as those of Hugging Face's Llama, or a softmax with `dtype=torch.float32` would round in the middle.
Leaves out what custom kernels and autograd functions do inside, and tensors that code makes without
a dtype: these are FP32, and are widened where they meet FP64.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from stability.probe.pausable_mode import PausableMode

__all__ = ["InDouble", "computing_in_double"]

_NARROW = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = (Tensor.float, Tensor.bfloat16, Tensor.half)


class InDouble(PausableMode):
    """A context in which floating dtypes narrower than FP64 are read as FP64."""

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function with FP64 for each narrow dtype that it is given."""
        if func in _CASTS:
            return args[0].double()
        given = {name: _widened(value) for name, value in kwargs.items()}
        return func(*map(_widened, args), **given)


@contextmanager
def computing_in_double(attentions: Sequence[Any]) -> Iterator[None]:
    """Inside, a model's code computes in FP64, but for its `attentions`, which cast as they do.

    Each of these enters `around` when it is called.
    """
    mode = InDouble()
    for attention in attentions:
        attention.around = mode.paused
    try:
        with mode:
            yield
    finally:
        for attention in attentions:
            attention.around = nullcontext


def _widened(value: Any) -> Any:
    return torch.float64 if isinstance(value, torch.dtype) and value in _NARROW else value
