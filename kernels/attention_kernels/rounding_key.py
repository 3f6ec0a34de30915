"""Which random bits the stochastic rounding of one attention call draws.

Unbiased rounding averages out over a training only if each update draws anew. Bits that the place
of an element alone decides are the same at every step: a frozen dither, which adds the same error
to an element each time, and its mean over steps does not fall. So a training passes a key to each
call, (run seed, step, layer, call), and draws bits that are a hash of the key, of the numerics'
seed and of the place. They are drawn again in the backward and wherever the call is made again with
its key (activation checkpointing, a probe), since nothing is counted.

A place is the number of the sequence in the batch and of its head, and the position. A rank that
holds some of the batch or of the heads says where they begin in the whole call, and how many heads
that has; its elements then draw what they draw where one rank holds all. Leaves out what is done
with the bits (`rounding`).
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from attention_kernels.points import ROUNDING_STREAM
from attention_kernels.random_bits import word_at

__all__ = ["Draws", "RoundingKey", "RoundingPlace", "draws_of"]

_WORD = 2**32 - 1


class RoundingKey(NamedTuple):
    """What tells the calls of a training apart; each an integer from 0 to 2**63 - 1."""

    seed: int
    step: int
    layer: int
    call: int = 0
    """Of several at one step and layer, as with gradient accumulation."""


class RoundingPlace(NamedTuple):
    """Where q lies in the whole call; each an integer from 0 to 2**31 - 1."""

    first_batch: int = 0
    first_head: int = 0
    """A multiple of the query heads that share a kv head."""
    heads: int = 0
    """How many query heads the whole call has; 0 says that all are here."""


_WHOLE = RoundingPlace()


@dataclass(frozen=True, slots=True)
class Draws:
    """The word of a call, into which a place is folded, and where the call lies in the whole."""

    word: int
    place: RoundingPlace = _WHOLE

    def heads(
        self, first_batch: int, batches: int, heads: int, group: int, device: torch.device
    ) -> Tensor:
        """Return the number of each head in the whole call, int64 `(batches, heads)`.

        `heads` are q's, or k's if `group`, the number of query heads to a kv head, is not 1.
        """
        whole = self.place.heads // group or heads
        batch = torch.arange(batches, device=device) + (self.place.first_batch + first_batch)
        head = torch.arange(heads, device=device) + self.place.first_head // group
        return (batch[:, None] * whole + head) & _WORD


def draws_of(seed: int, rounding: Sequence[int] = ()) -> Draws:
    """Return what a call draws by: the numerics' `seed`, and its key and place if it has them.

    `rounding` is a `RoundingKey` and a `RoundingPlace` one after the other, or empty.
    """
    if not rounding:
        return _unkeyed(seed)
    key, place = rounding[:4], RoundingPlace(*rounding[4:])
    halves = [half for x in key for half in (x & _WORD, x >> 32)]
    return Draws(word_at(seed, ROUNDING_STREAM, *halves), place)


@functools.lru_cache(maxsize=256)
def _unkeyed(seed: int) -> Draws:
    # of each call that rounds by no key, which is most: the hash takes longer than to look it up
    return Draws(word_at(seed))
