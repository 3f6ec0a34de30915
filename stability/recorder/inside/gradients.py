"""Tells whether an optimizer moves its weights, and by whose gradients: a loss's, or others.

Labels are found in a loss's record (`loss_targets`). Gradients that no loss's `backward()` has left
may be of any labels, and that is a doubt, in these words.
"""

from __future__ import annotations

from typing import Any, Iterable, List

from torch import Tensor, nn
from torch.optim import Optimizer

__all__ = [
    "GIVEN",
    "UNBACKED",
    "has_gradients",
    "is_given_gradient",
    "key_of",
    "trains_some",
    "weights_of",
]

UNBACKED = (
    "labels can't be checked: an update's gradients came from no loss's backward(), as those of "
    "torch.autograd.grad or set by hand"
)
GIVEN = (
    "labels can't be checked: backward() was given a gradient, or called on more than one number"
)


def has_gradients(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer moves a weight."""
    return any(x.grad is not None for x in weights_of(optimizer))


def is_given_gradient(args: Any, kwargs: Any) -> bool:
    """Whether `torch.autograd.backward`, called with these after its tensors, has a gradient."""
    given = args[0] if args else kwargs.get("grad_tensors")
    if isinstance(given, (list, tuple)):
        return any(each is not None for each in given)
    return given is not None


def key_of(optimizer: Optimizer) -> int:
    """Return what an optimizer is known by: its first weight, as one may be made anew each time."""
    return next((id(x) for x in weights_of(optimizer)), id(optimizer))


def weights_of(optimizer: Optimizer) -> List[Tensor]:
    """Return the weights of all groups."""
    return [x for group in optimizer.param_groups for x in group["params"]]


def trains_some(module: nn.Module, optimizers: Iterable[Optimizer]) -> bool:
    """Whether one of the optimizers has a weight of `module`."""
    weights = {id(x) for optimizer in optimizers for x in weights_of(optimizer)}
    return any(id(x) in weights for x in module.parameters())
