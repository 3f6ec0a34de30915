"""Trains a model once, and keeps what goes in and out of the modules that are looked at."""

from collections.abc import Iterable
from contextlib import AbstractContextManager

from torch import Tensor, nn
from torch.nn import functional as F


def trained(
    model: nn.Module, tokens: Tensor, around: AbstractContextManager, look: Iterable[str]
) -> tuple[Tensor, dict[str, dict[str, Tensor]]]:
    """Return the logits, and x, y, dx and dy of each module of `look`; gradients are left behind.

    The forward is made inside of `around`.
    """
    seen: dict[str, dict[str, Tensor]] = {name: {} for name in look}

    def hook(name):
        def keep(module, args, out):
            x = args[0]
            seen[name].update(x=x.detach(), y=out.detach())
            out.register_hook(lambda grad: seen[name].update(dy=grad.detach()))
            if x.requires_grad:
                x.register_hook(lambda grad: seen[name].update(dx=grad.detach()))

        return keep

    for name in seen:
        model.get_submodule(name).register_forward_hook(hook(name))
    with around:
        logits = model(tokens)
    model.zero_grad()
    F.cross_entropy(logits.float().flatten(0, 1), tokens.flatten()).backward()
    return logits.detach(), seen
