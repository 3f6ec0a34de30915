"""Which values of a model's vectors move by noise alone: a nudge of one ULP sends them elsewhere.

Some weights have no gradient but its rounding, as the bias of keys, which softmax takes out again,
or a bias before batch normalisation. Adam divides by the gradient's size, so that it moves them as
far as any weight, in a direction that is rounding's; so the same arithmetic moves them elsewhere
after a change in the last bit of anything. They tell nothing of an arm, and can be nearly all of
the distance between two. In a GPT of 2 layers and width 64 with a bias on q, k and v they were 91
to 98 % of the squared distance between a nudge and its baseline.

Asked is by which part of its way from the start a value went elsewhere in the nudges. Over a block
of 16 values this part is near 1 for noise; of those with a gradient, in the same GPT, it was 1e-6
to 0.06 until chaos had caught up. Only vectors are asked: of a matrix all rows have a gradient, and
blocks that were chosen by what they did would be chosen by chance. Leaves out files
(`analysis.left_out`) and what is made of the rest (`analysis.excess`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["BLOCK", "Ranges", "noise_moved"]

BLOCK = 16
"""Values that are asked together: heads are as long or longer, and q, k and v may share a bias."""

Ranges = tuple[tuple[int, int], ...]
"""Begin and end of each range of a vector's values, ascending, none touching the next."""

Vectors = Mapping[str, Tensor]
"""Tensors of one dimension by name."""


def noise_moved(
    baseline: tuple[Vectors, Vectors], nudges: Sequence[tuple[Vectors, Vectors]], part: float
) -> dict[str, Ranges]:
    """Return by name the ranges of values that nudges send elsewhere by `part` of their way.

    `baseline` and each of `nudges` are a run's vectors at its start and later on, in any float
    dtype. Names that hold no such value are left out, and those that are not in all of them with
    one shape. Ways are compared, not places, since a nudge starts elsewhere. A block that does not
    move in the baseline is kept, and so is one that holds a NaN: what moves it there is no noise.
    Without a nudge nothing is known to be noise.
    """
    states = [*baseline, *(state for nudge in nudges for state in nudge)]
    found = {}
    for name in baseline[1] if nudges else ():
        if len({state[name].shape if name in state else None for state in states}) > 1:
            continue
        way = _way(name, *baseline)
        apart = torch.stack([_blocks(_way(name, *nudge) - way) for nudge in nudges]).mean(0)
        own = _blocks(way)
        ranges = _ranges(((apart > part**2 * own) & (own > 0)).tolist(), len(way))
        if ranges:
            found[name] = ranges
    return found


def _way(name: str, start: Vectors, end: Vectors) -> Tensor:
    return end[name].double() - start[name].double()


def _blocks(x: Tensor) -> Tensor:
    """Return the sum of squares of each block."""
    padded = torch.nn.functional.pad(x, (0, -len(x) % BLOCK))
    return padded.view(-1, BLOCK).square().sum(1)


def _ranges(is_noise: Sequence[bool], size: int) -> Ranges:
    found: list[tuple[int, int]] = []
    for block in (number for number, noisy in enumerate(is_noise) if noisy):
        begin, end = block * BLOCK, min(size, (block + 1) * BLOCK)
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)
