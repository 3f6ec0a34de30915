"""Moves the weights a training starts from by units in the last place: another draw of chaos.

The coin of a weight is a function of the seed, the draw, its name and its place in the whole
tensor, so it falls alike however the weights are spread over ranks. Copies of the weights that a
moving average starts from are moved with them.
"""

from __future__ import annotations

import hashlib
from typing import Dict

import torch
from torch import Tensor, nn

from .names import copies_of
from .older_torch import distributed_like

__all__ = ["nudge_weights"]


def nudge_weights(state: Dict[str, Tensor], ulps: int, seed: int, draw: int) -> None:
    """Move each parameter in `state` by `ulps` units in the last place, up or down by a coin."""
    with torch.no_grad():
        for name, weight in state.items():
            if not isinstance(weight, nn.Parameter):
                continue
            copies = copies_of(name, weight)
            words = f"nudge {seed} {draw} {name}".encode()
            number = int.from_bytes(hashlib.sha256(words).digest()[:4], "big")
            generator = torch.Generator().manual_seed(number)
            coin = torch.randint(0, 2, weight.shape, generator=generator) * 2 - 1
            moved = _moved(weight, coin, ulps)
            for each in [weight, *copies]:
                each.copy_(moved)


def _moved(weight: Tensor, coin: Tensor, ulps: int) -> Tensor:
    """Return the nudged weight, sharded as `weight` is."""
    gather = getattr(weight, "full_tensor", None)
    whole = (gather() if gather else weight).detach().clone()
    target = (coin * torch.inf).to(whole)
    for _ in range(ulps):
        whole = torch.nextafter(whole, target)
    return distributed_like(whole, weight)
