"""Which values of a model's vectors noise moves: a nudge of one ULP sends them elsewhere.

Some weights have no gradient but its rounding, as a bias of keys, which softmax takes out again
where no position is rotated into it. Adam divides by the gradient's size, so that it moves them as
far as any weight, in a direction that is rounding's; the same arithmetic moves them elsewhere after
a change in the last bit of anything. They tell little of an arm, and can be nearly all of the
distance between two: in `examples/gpt.py`, 2 layers of width 64 with one bias for q, k and v, 99.5
to 99.8 % of the squared distance between a nudge and its baseline (steps 10 to 30, 6 seeds).

Asked are two things of a block of values that follow one another: by which part of its way from the
start nudges sent it elsewhere, and whether that is far beside what they did to an average weight.
The part was 0.61 to 2.3 for noise there, and 8e-6 to 0.0064 for values with a gradient. What
rounding moves by little, as without Adam, is no noise that matters. Only vectors are asked: of a
matrix all rows have a gradient, and blocks that were chosen by what they did would be chosen by
chance. Leaves out files and the limits (`analysis.left_out`).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

__all__ = ["MOST", "Ranges", "noise_moved", "vector_names"]

MOST = 0.1
"""Of a model's values: vectors that hold more of them are matrices laid flat, and none is asked."""

Ranges = tuple[tuple[int, int], ...]
"""Begin and end of each range of a vector's values, ascending, none touching the next."""

Vectors = Mapping[str, Tensor]
"""Tensors of one dimension by name."""


def vector_names(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Return the names of the vectors that may be asked, of a model's weights by their shapes."""
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    names = [name for name in sorted(shapes) if len(shapes[name]) == 1]
    return names if sum(sizes[name] for name in names) <= MOST * sum(sizes.values()) else []


def noise_moved(
    baseline: tuple[Vectors, Vectors],
    nudges: Sequence[tuple[Vectors, Vectors]],
    *,
    part: float,
    least: float,
    block: int,
) -> dict[str, Ranges]:
    """Return by name the ranges of values that nudges send elsewhere by `part` of their way.

    `baseline` and each of `nudges` are a run's vectors at its start and later on, in any float
    dtype. Asked are blocks of `block` values, the last with what is left over, by their root mean
    square; what nudges do to a block is also at least `least`, in the weights' unit. Vectors that
    are shorter are kept: of few values some turn back by chance. Names that hold no such block are
    left out, and those that are not in all states with one shape. Ways are compared, not places: a
    nudge starts elsewhere. A block that does not move in the baseline is kept, and so is one that
    holds a NaN: what moves it there is no noise. Without a nudge nothing is known to be noise.
    """
    states = [*baseline, *(state for nudge in nudges for state in nudge)]
    found = {}
    for name in baseline[1] if nudges else ():
        if len({state[name].shape if name in state else None for state in states}) > 1:
            continue
        way = _way(name, *baseline)
        if len(way) < block:
            continue
        sizes = _blocks(torch.ones_like(way), block)
        apart = torch.stack([_blocks(_way(name, *nudge) - way, block) for nudge in nudges]).mean(0)
        own = _blocks(way, block)
        is_noise = (apart > part**2 * own) & (apart >= least**2 * sizes) & (own > 0)
        ranges = _ranges(is_noise.tolist(), block, len(way))
        if ranges:
            found[name] = ranges
    return found


def _way(name: str, start: Vectors, end: Vectors) -> Tensor:
    return end[name].double() - start[name].double()


def _blocks(x: Tensor, block: int) -> Tensor:
    """Return the sum of squares of each block; the last one holds what is left over."""
    squares, count = x.square(), len(x) // block
    found = squares[: count * block].view(count, block).sum(1)
    found[-1] += squares[count * block :].sum()
    return found


def _ranges(is_noise: Sequence[bool], block: int, size: int) -> Ranges:
    found: list[tuple[int, int]] = []
    for number in (number for number, noisy in enumerate(is_noise) if noisy):
        begin = number * block
        end = size if number == len(is_noise) - 1 else begin + block
        if found and found[-1][1] == begin:
            begin = found.pop()[0]
        found.append((begin, end))
    return tuple(found)
