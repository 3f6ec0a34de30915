"""The keys of stochastic rounding in a training: (run seed, step, layer, call) of an attention.

Linear layers that round so have such keys too, with the number of their module for the layer.

A key is a function of where the training stands and counts no calls. So a layer draws the same bits
wherever its call is made again: by activation checkpointing, by the probe's shadows and second
forward pass, by the gradient probe, after a resume. `call` tells the batches apart that one update
accumulates; the parts of one batch are told apart by where they begin in it, so that a batch draws
the same bits in one piece, in micro-batches, or over ranks. Evaluations have a call of their own.

Attentions that round otherwise are not touched. Leaves out who says where the training stands
(`callbacks.rounding_steps`), and what bits a key gives (`attention_kernels.rounding_key`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from stability.probe.attention_registry import ResolvedAttention

__all__ = ["EVALUATION", "RoundingKeys", "keyed"]

EVALUATION = 2**32
"""The call of a key where no update is under way; more batches than an update accumulates."""


@dataclass(kw_only=True, slots=True)
class RoundingKeys:
    """Where the training of one model stands: after `step` updates, in its `call`-th batch."""

    seed: int
    step: int = 0
    call: int = EVALUATION
    first_batch: int = 0
    """Where the sequences of a micro-batch, or of a rank, begin in their batch."""
    head_part: int = 0
    head_parts: int = 1
    """Which of how many equal parts of a layer's heads this rank holds."""

    def at(self, layer: int, q: Tensor) -> dict[str, Any]:
        """Return what `flash_attention` takes for the call of a layer with this q."""
        heads = q.shape[1]
        place = (self.first_batch, self.head_part * heads, self.head_parts * heads)
        return {
            "rounding_key": (self.seed, self.step, layer, self.call),
            "rounding_place": place,
        }

    def of_module(self, number: int) -> tuple[int, ...]:
        """Return what `recipe_linear` takes as the key of a module: it and the place of a batch."""
        return (self.seed, self.step, number, self.call, self.first_batch, 0, 0)


def keyed(attention: ResolvedAttention, layer: int, keys: RoundingKeys) -> ResolvedAttention:
    """Return `attention` as a layer's, which draws by `keys` if it rounds stochastically."""
    if not attention.takes_rounding_key:
        return attention
    # the key is given here, and no caller's is taken
    function = partial(_attend_by_key, attention.function, layer, keys)
    return replace(attention, function=function, takes_rounding_key=False)


def _attend_by_key(
    function: Callable[..., Any],
    layer: int,
    keys: RoundingKeys,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    **options: Any,
) -> Any:
    return function(q, k, v, **options, **keys.at(layer, q))
