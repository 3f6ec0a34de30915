"""Keeps a forward pass that we add from what DistributedDataParallel shares between ranks.

Its forward hands buffers from the first rank to the others, and prepares to add up gradients over
ranks in the next backward pass: after one of ours the first micro-batch under `no_sync` would be
added up too early, and the next forward would leave buffers as they are. Leaves out weights that
are sharded, which a pass has to gather.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.parallel import DistributedDataParallel

__all__ = ["apart_from_ranks"]


@contextmanager
def apart_from_ranks() -> Iterator[Callable[[nn.Module], None]]:
    """Yield a function to be called with each module before it runs; at the end all is put back."""
    kept: dict[DistributedDataParallel, tuple[bool, bool]] = {}

    def set_apart(module: nn.Module) -> None:
        if isinstance(module, DistributedDataParallel) and module not in kept:
            kept[module] = module.require_backward_grad_sync, module.require_forward_param_sync
            module.require_backward_grad_sync = module.require_forward_param_sync = False

    try:
        yield set_apart
    finally:
        for module, (of_gradients, of_buffers) in kept.items():
            module.require_backward_grad_sync = of_gradients
            module.require_forward_param_sync = of_buffers
