"""Moves the weights a training starts from by units in the last place: another draw of chaos.

The coin of a weight is a function of the seed, the draw, its name and its place in the whole
tensor, so it falls alike however the weights are spread over ranks. Copies of the weights that a
moving average starts from are moved with them. An optimizer's masters of a model in fewer bits are
weights too.
"""

from __future__ import annotations

from typing import Dict, Set

import torch
from torch import Tensor, nn

from .mixing import GOLDEN, key_of, mixed
from .names import cast_of, copies_of, masters_of
from .older_torch import distributed_like
from .prefixed_copies import prefixed_copies

__all__ = ["nudge_weights"]

_PORTION = 2**20
"""Coins drawn at a time, in 64 bits each."""


def nudge_weights(state: Dict[str, Tensor], ulps: int, seed: int, draw: int) -> None:
    """Move each trained weight in `state` by `ulps` units in the last place, up or down by a coin.

    A weight of a model whose master an optimizer updates gets the master's value, rounded: the
    model then begins where its masters do.
    """
    masters = masters_of(state)
    taken: Set[int] = set()
    beside = prefixed_copies(state)
    moved_with = {id(x) for copies in beside.values() for x in copies}
    with torch.no_grad():
        for name, weight in [*masters.items(), *state.items()]:
            is_master = name in masters
            if id(weight) in taken or not (is_master or isinstance(weight, nn.Parameter)):
                continue
            if id(weight) in moved_with:
                continue
            # before it moves: both are known by the bits that they share with it
            copies = cast_of(weight, taken) if is_master else copies_of(name, weight)
            moved = _moved(weight, _coin(key_of("nudge", seed, draw, name), weight), ulps)
            for each in [weight, *copies, *beside.get(id(weight), ())]:
                each.copy_(moved)
            if is_master:
                taken.update(map(id, [weight, *copies]))


def _coin(key: int, weight: Tensor) -> Tensor:
    """Return 1 or -1 for each element of the whole tensor, int8: `model.index_stream`'s."""
    count = weight.numel()
    coin = torch.empty(count, dtype=torch.int8)
    for start in range(0, count, _PORTION):
        end = min(start + _PORTION, count)
        words = mixed(torch.arange(start + 1, end + 1) * GOLDEN + key)
        coin[start:end] = ((words >> 63) & 1) * 2 - 1
    return coin.reshape(weight.shape)


def _moved(weight: Tensor, coin: Tensor, ulps: int) -> Tensor:
    """Return the nudged weight, sharded as `weight` is."""
    gather = getattr(weight, "full_tensor", None)
    whole = (gather() if gather else weight).detach().clone()
    target = (coin * torch.inf).to(whole)
    for _ in range(ulps):
        whole = torch.nextafter(whole, target)
    return distributed_like(whole, weight)
