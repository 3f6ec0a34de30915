"""What autocast makes of the inputs of an attention: which dtype, rounded how, converted how often.

`scaled_dot_product_attention` is an operation that autocast lowers: it converts q, k, v and an
additive mask at the call. A parameter it converts once, however many calls take it, and keeps the
result until it ends, so that the calls' gradients are summed in the narrow dtype.
Source: torch 2.13, `aten/src/ATen/autocast_mode.{h,cpp}`.
"""

from collections import deque
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "autocast_dtype",
    "lowered_dtype",
    "product_dtypes",
    "rounded_as",
]


def autocast_dtype(q: Tensor, k: Tensor, v: Tensor) -> torch.dtype | None:
    """Return the dtype to which the caller's autocast converts q, k and v, None if it does not.

    Autocast leaves FP64 alone.
    """
    device, dtypes = q.device.type, {q.dtype, k.dtype, v.dtype}
    if not torch.is_autocast_enabled(device) or torch.float64 in dtypes:
        return None
    dtype = torch.get_autocast_dtype(device)
    return None if dtypes == {dtype} else dtype


def lowered_dtype(x: Tensor) -> torch.dtype | None:
    """Return the dtype to which autocast converts the inputs of an operation that it lowers.

    None where autocast is off; FP64 it leaves alone.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return None
    return torch.get_autocast_dtype(device)


_PRODUCTS = ("Bmm", "Mm", "Baddbmm", "Addbmm", "Addmm", "ScaledDotProduct")
_NEAREST = 1000
"""How many nodes of a graph are looked at: a tiled attention has some dozens for each tile."""


def product_dtypes(out: Tensor, inputs: Iterable[Tensor]) -> set[torch.dtype]:
    """Return in which dtypes the products between `inputs` and `out` were made, if autograd knows.

    Those nearest to `out` are looked at. Empty where no graph is recorded, or it is one node.
    Nothing that the graph has saved is read: a checkpoint would compute it again.
    """
    ends = {x.grad_fn for x in inputs}
    found: set[torch.dtype] = set()
    seen, waiting = {out.grad_fn}, deque([out.grad_fn])
    while waiting and len(seen) < _NEAREST:
        node = waiting.popleft()
        if node is None or node in ends:
            continue
        if node.name().startswith(_PRODUCTS):
            found.add(node._input_metadata[0].dtype)  # pyright: ignore[reportAttributeAccessIssue]
        new = [after for after, _ in node.next_functions if after not in seen]
        seen.update(new)
        waiting.extend(new)
    return found


def rounded_as(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the values of `x` rounded to `dtype`, in its own dtype; its gradient passes as is."""
    return _Rounded.apply(x, dtype)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None
