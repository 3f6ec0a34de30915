"""One attention call made again, outside of the run: its results, and its gradients under one dout.

Inputs are detached copies, autograd records into a graph of its own, the caller's autocast is off,
and random state is put back. Leaves out which calls are repeated and what is compared
(`attention_probe`).
"""

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from attention_kernels import golden_attention
from stability.probe.captured_call import AttentionCall, BoundAttention
from stability.probe.isolation import isolated

__all__ = [
    "GRADIENTS",
    "BadResultError",
    "gradient_of",
    "repeat_call",
    "repeat_golden",
]

GRADIENTS = ("dq", "dk", "dv")


class BadResultError(ValueError):
    """An attention returned something that is no result."""


def repeat_call(
    attention: BoundAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    trained: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return `out`, `lse` if the attention gives one, and with `dout` also `dq`, `dk` and `dv`.

    The gradients are autograd's under `dout`, in the inputs' dtype; those of `trained` are there,
    as `dbias` and `dsinks`, if the attention gives them. BadResultError if what the attention
    returns differs from what SDPA does in shape or dtype, or carries no gradient of q, k or v.
    """
    # copies: a candidate may write into its inputs, and the run goes on with its own
    inputs = {"q": q, "k": k, "v": v, **trained}
    leaves = {
        name: x.detach().clone().requires_grad_(dout is not None) for name, x in inputs.items()
    }
    with isolated(q.device), torch.set_grad_enabled(dout is not None):
        given = {name: leaves[name] for name in trained}
        out, lse = attention(*(leaves[name] for name in "qkv"), **given)
        # here and not when it is compared, so that the finding names the attention at fault
        _check_result(out, q, v)
        results = {"out": out.detach()}
        if lse is not None:
            results["lse"] = lse.detach()
        if dout is not None:
            results |= _gradients(out, leaves, dout)
    return results


def repeat_golden(
    call: AttentionCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor | None = None,
    trained: Mapping[str, Tensor] = MappingProxyType({}),
) -> dict[str, Tensor]:
    """Return what `repeat_call` does for the golden, everything in FP64.

    The leaves are FP64 too: autograd rounds a gradient to the dtype of its leaf.
    """

    def golden(q: Tensor, k: Tensor, v: Tensor, **trained: Tensor) -> tuple[Tensor, Tensor | None]:
        return golden_attention(q, k, v, return_lse=True, **call.mask_with(**trained))

    dout = None if dout is None else dout.double()
    wide = {name: x.double() for name, x in trained.items()}
    return repeat_call(golden, q.double(), k.double(), v.double(), dout, wide)


def gradient_of(name: str) -> str:
    """Return what the gradient of an input is called."""
    return f"d{name}"


def _gradients(out: Tensor, leaves: Mapping[str, Tensor], dout: Tensor) -> dict[str, Tensor]:
    if not out.requires_grad:
        raise BadResultError("out carries no gradient")
    # a copy of dout too: the run's backward goes on with it after the hook
    # an unused input is allowed here, to be named below
    given = list(leaves.values())
    found = torch.autograd.grad(out, given, dout.detach().clone(), allow_unused=True)
    gradients = dict(zip(map(gradient_of, leaves), found, strict=True))
    for name in GRADIENTS:
        if gradients[name] is None:
            raise BadResultError(f"no gradient reaches {name.removeprefix('d')}")
    return {name: x for name, x in gradients.items() if x is not None}


def _check_result(out: object, q: Tensor, v: Tensor) -> None:
    shape = (*q.shape[:-1], v.shape[-1])
    expected = f"{shape} {q.dtype}"
    if not isinstance(out, Tensor):
        raise BadResultError(f"returned {type(out).__name__}, expected a tensor {expected}")
    if out.shape != shape or out.dtype != q.dtype:
        raise BadResultError(f"returned {tuple(out.shape)} {out.dtype}, expected {expected}")
