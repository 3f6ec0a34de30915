"""The smallest change of weights that a format can hold: the ladder's lowest rung above zero."""

import torch
from torch import nn

__all__ = ["nudge_weights"]


def nudge_weights(model: nn.Module, ulps: int, seed: int) -> None:
    """Move every weight of `model`, in place, by `ulps` units in the last place of its dtype.

    Up or down is decided for each weight by a coin of a local generator seeded with `seed`. A zero
    becomes the `ulps`-th subnormal. `ulps=0` changes nothing.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            coin = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
            target = (coin * torch.inf).to(parameter)
            for _ in range(ulps):
                parameter.copy_(torch.nextafter(parameter, target))
