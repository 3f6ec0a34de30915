"""One attention once more, on copies: what a shadow or the golden gives for a call of the run.

Nothing of it reaches the run: the inputs are detached copies, autograd records into a graph of its
own, the caller's autocast is off, random state is put back. Leaves out the comparison (`probe`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from attention_kernels import MaskArguments, golden_attention

__all__ = ["GRADIENTS", "BadResultError", "WithLse", "isolated", "rerun", "rerun_golden"]

GRADIENTS = ("dq", "dk", "dv")


class BadResultError(ValueError):
    """An attention returned something that is no result."""


WithLse = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor | None]]
"""An attention of q, k and v with its mask bound, that returns out and the LSE, or None."""


@contextmanager
def isolated(device: torch.device) -> Iterator[None]:
    """Leave the caller's random state and autocast as they were, and switch autocast off inside."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.autocast(device.type, enabled=False):
        yield


def rerun(
    attend: WithLse, q: Tensor, k: Tensor, v: Tensor, dout: Tensor | None = None
) -> dict[str, Tensor]:
    """Return `out`, `lse` if there is one, and with `dout` also `dq`, `dk` and `dv`.

    The gradients are those of autograd through `attend` under `dout`, in the inputs' dtype.
    BadResultError if what it returns has another shape or dtype than q, or no gradient.
    """
    leaves = [x.detach().clone().requires_grad_(dout is not None) for x in (q, k, v)]
    with isolated(q.device), torch.set_grad_enabled(dout is not None):
        out, lse = attend(*leaves)
        _check(out, q)
        results = {"out": out.detach()}
        if lse is not None:
            results["lse"] = lse.detach()
        if dout is not None:
            results |= _gradients(out, leaves, dout)
    return results


def rerun_golden(
    q: Tensor, k: Tensor, v: Tensor, mask: MaskArguments, dout: Tensor | None = None
) -> dict[str, Tensor]:
    """Return what `rerun` does for the golden, everything in FP64."""
    leaves = [x.detach().double().requires_grad_(dout is not None) for x in (q, k, v)]
    with isolated(q.device), torch.set_grad_enabled(dout is not None):
        out, lse = golden_attention(*leaves, return_lse=True, **mask)
        results = {"out": out.detach(), "lse": lse}
        if dout is not None:
            results |= _gradients(out, leaves, dout.double())
    return results


def _gradients(out: Tensor, leaves: list[Tensor], dout: Tensor) -> dict[str, Tensor]:
    if not out.requires_grad:
        raise BadResultError("out carries no gradient")
    found = torch.autograd.grad(out, leaves, dout.detach().clone(), allow_unused=True)
    missing = [name for name, x in zip(GRADIENTS, found, strict=True) if x is None]
    if missing:
        raise BadResultError(f"no gradient reaches {missing[0].removeprefix('d')}")
    return dict(zip(GRADIENTS, found, strict=True))


def _check(out: object, q: Tensor) -> None:
    expected = f"{tuple(q.shape)} {q.dtype}"
    if not isinstance(out, Tensor):
        raise BadResultError(f"returned {type(out).__name__}, expected a tensor {expected}")
    if out.shape != q.shape or out.dtype != q.dtype:
        raise BadResultError(f"returned {tuple(out.shape)} {out.dtype}, expected {expected}")
