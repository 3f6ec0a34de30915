"""What newer versions of torch have under a public name, and torch 2.1 under another one.

Everything that the recorder takes from torch beyond what 2.1 has stands here. Leaves out what no
version before has at all, as `torch.amp.GradScaler` for a CPU: it is asked for where it is used.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Callable, Iterable, Optional, Tuple

import torch
from torch import Tensor
from torch.optim import Optimizer

__all__ = [
    "autocast_dtype",
    "current_trace",
    "distributed_like",
    "is_compiling",
    "only_backend",
    "restore_step_hooks",
]

# one of torch's own functions, which a graph holds as a constant: one of ours would be looked into
is_compiling: Callable[[], bool] = (
    getattr(torch.compiler, "is_compiling", None) or torch._utils.is_compiling  # pyright: ignore
)
"""Whether dynamo traces the caller; torch.compiler has it from 2.3 on."""


def autocast_dtype(kind: str) -> Optional[torch.dtype]:
    """Return the dtype of autocast on devices of a kind; None where it is off."""
    named: Any = getattr(torch, "get_autocast_dtype", None)  # torch 2.4 and newer
    if named is not None:
        return named(kind) if torch.is_autocast_enabled(kind) else None
    if kind == "cpu":
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if torch.is_autocast_enabled() else None


def current_trace() -> Tuple[Any, int]:
    """Return which graph is traced now, and which attempt this is: a graph break begins anew."""
    context: Any = getattr(getattr(torch, "_guards", None), "CompileContext", None)
    trace_id: Any = getattr(context, "current_trace_id", None)  # torch 2.2 and newer
    found = trace_id() if trace_id is not None else None
    return (None, 0) if found is None else (found.compile_id, found.attempt)


def only_backend(name: str) -> AbstractContextManager[Any]:
    """Allow one backend of `scaled_dot_product_attention`, by its name in `SDPBackend`."""
    try:
        from torch.nn.attention import SDPBackend, sdpa_kernel  # torch 2.3 and newer
    except ImportError:
        if name not in ("MATH", "FLASH_ATTENTION", "EFFICIENT_ATTENTION"):
            raise ValueError(f"attention: torch {torch.__version__} has no {name}") from None
        return torch.backends.cuda.sdp_kernel(
            enable_math=name == "MATH",
            enable_flash=name == "FLASH_ATTENTION",
            enable_mem_efficient=name == "EFFICIENT_ATTENTION",
        )
    return sdpa_kernel(getattr(SDPBackend, name))


def distributed_like(whole: Tensor, sharded: Tensor) -> Tensor:
    """Return a whole tensor spread over ranks as `sharded` is; as it is where that is whole."""
    if not hasattr(sharded, "full_tensor"):
        return whole
    try:
        from torch.distributed.tensor import distribute_tensor  # torch 2.5 and newer
    except ImportError:
        from torch.distributed._tensor import distribute_tensor  # pyright: ignore
    return distribute_tensor(whole, sharded.device_mesh, sharded.placements)  # pyright: ignore


_HOOKED: Any = Optimizer.profile_hook_step(lambda optimizer: None)
"""A step with its hooks: all that have them share its code."""


def restore_step_hooks(optimizers: Iterable[Optimizer]) -> None:
    """Let the steps of torch's own optimizers call their hooks again, where dynamo took these away.

    Older versions do so at the first call of anything that is compiled, for whole classes.
    """
    for kind in {type(optimizer) for optimizer in optimizers}:
        step: Any = kind.step
        is_marked = getattr(step, "hooked", False) and kind.__module__.startswith("torch.optim.")
        if is_marked and not _has_hooks(step):
            hooked: Any = Optimizer.profile_hook_step(step)
            hooked.hooked = True
            kind.step = hooked


def _has_hooks(step: Any) -> bool:
    """Whether a step calls its hooks, also within a wrapper, as that of torch.compiler.disable."""
    while step is not None:
        if getattr(step, "__code__", None) is _HOOKED.__code__:
            return True
        step = getattr(step, "__wrapped__", None)
    return False
