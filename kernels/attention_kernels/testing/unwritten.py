"""Rows of a result that a kernel has not written: the tail, where the last tile is not full.

Where memory was zero before, they are zero, which is a mistake like others (`mistakes`). Where it
was not they hold anything, and only that the tail alone is off tells of it. Leaves out whether it
is the store that is masked wrongly, or the grid of programs that ends too early.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from attention_kernels.testing.cells import Reference
from attention_kernels.testing.formula import RESULTS, Formula, Intermediates
from attention_kernels.testing.limits import Excess
from attention_kernels.testing.sentences import heads_in_words, listed

__all__ = ["TILES", "other_values_in_the_tail", "zeros_of_unwritten_rows"]

TILES = (16, 32, 64, 128)
"""The tiles that kernels take."""


def zeros_of_unwritten_rows(
    where: Reference, formula: Formula, whole: bool
) -> Iterator[tuple[str, str, Callable[[], dict[str, Tensor]]]]:
    """Yield the noun, the words and the results of rows that are zero, as they were before.

    If `whole` of tiles too that have every row of the cell.
    """
    golden = where.golden

    def with_zeros(name: str, rows: Tensor) -> dict[str, Tensor]:
        return {**golden, name: golden[name].masked_fill(rows[:, None], 0.0)}

    for name in ("out", "dq", "dk", "dv"):
        length = golden[name].shape[2]
        every = torch.ones(length, dtype=torch.bool)
        yield name, f"{name} is zero, it was not written", partial(with_zeros, name, every)
        for which, rows in _rows_not_written(length, _positions(name)):
            if rows.any() and (whole or not rows.all()):
                words = f"{name} is zero in {which}: it was not written"
                yield name, words, partial(with_zeros, name, rows)
                if name == "out":
                    read = formula.with_(change=partial(_without, rows)).results
                    yield name, f"{words}, and delta reads it so", read
                    skipped = f"out is zero in {which}, and no gradient has them: rows not computed"
                    yield name, skipped, partial(_left_out, formula, rows)


def _without(rows: Tensor, known: Intermediates) -> tuple[Tensor, Tensor]:
    return known.out.masked_fill(rows[:, None], 0.0), known.lse


def _left_out(formula: Formula, rows: Tensor) -> dict[str, Tensor]:
    """Return the results of attention by other rows alone, as autograd makes them of a loop."""
    made = formula.with_(dkv_queries=~rows).results()
    return made | {name: made[name].masked_fill(rows[:, None], 0.0) for name in ("out", "dq")}


def _positions(result: str) -> str:
    return "key" if result in ("dk", "dv") else "row"


def _rows_not_written(length: int, what: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the words for rows that may be left, and which of so many they are."""
    index = torch.arange(length)
    yield f"the last {what}", index == length - 1
    for tile in TILES:
        yield f"the tail, the last tile of {tile} {what}s that is not full", _tail(index, tile)
        yield f"the last tile of {tile} {what}s", index >= (length - 1) // tile * tile


def _tail(index: Tensor, tile: int) -> Tensor:
    return index >= len(index) // tile * tile


def other_values_in_the_tail(found: Sequence[Excess]) -> str:
    """Return that of a result the tail alone holds what no mistake gives; "" if other rows do.

    If out is off, the gradients are by its delta: then it is told of out.
    """
    failing = {excess.result for excess in found}
    names = [name for name in RESULTS if name in ({"out"} & failing or failing - {"lse"})]
    by_row = [x for x in found if x.statistic == "row" and x.result in names]
    if {x.result for x in by_row} != set(names) or not names:
        return ""
    tiles = [
        tile
        for tile in TILES
        if all(_is_in_the_tail(x, tile) for x in by_row)
        # a single tile of a whole length is a tail too, and tells nothing
        and len({_length(x) for x in by_row if _length(x) > tile}) > 1
    ]
    if not tiles:
        return ""
    what = listed(list(dict.fromkeys(_positions(name) for name in names)))
    return (
        f"{listed(names)} {'hold' if len(names) > 1 else 'holds'} other values in the tail, the "
        f"last tile of {tiles[0]} {what}s that is not full: it was not written, or from elsewhere, "
        f"{heads_in_words(by_row[0].heads, by_row[0].of_heads)} (seen in "
        f"{', '.join(name for name in RESULTS if name in failing)}); no row before it is far off, "
        "and smaller errors show once that is mended"
    )


def _length(excess: Excess) -> int:
    return excess.evidence[0].squared_errors.shape[-1]


def _is_in_the_tail(excess: Excess, tile: int) -> bool:
    return min(excess.rows) >= _length(excess) // tile * tile
