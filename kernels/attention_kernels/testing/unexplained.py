"""What is too large still, once the results of a mistake that was found are taken for right.

A mistake that is named in one small cell is made in every cell that a check has looked at, and each
result is measured against what the mistake computes there, or, in a head that is closer to what is
right, against that. What is beyond a limit then does not follow from the mistake: another one
stands beside it. Rounding is allowed for as plain attention has it, larger where the mistake's own
results are larger.

Leaves out which mistake it is (`diagnosis`).
"""

import math
from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from attention_kernels.formats import FORMATS, input_format
from attention_kernels.testing.cells import Reference
from attention_kernels.testing.golden_faults import spacing
from attention_kernels.testing.limits import (
    Excess,
    excesses,
    excesses_in_a_cell,
    excesses_over_draws,
)
from attention_kernels.testing.measured import Measured, measure
from attention_kernels.testing.mistakes import Mistake, mistakes

__all__ = ["is_sure", "least_unexplained"]

_SURELY = 5.0
"""Limits that an excess must have to be surely left: a mistake has roundings that no right
attention has, e.g. of weights above 1 in the backward, up to 3.0 limits in BF16 in the zoo."""
_LEAST_FACTOR = 0.1
"""The factor of a second mistake from which on it is one: less is a result that is missing."""
_OVERFLOWS = 1e6
"""Times the norm of the right row beyond which a value says nothing, nor below a part of it."""


def least_unexplained(
    choices: Sequence[Mistake], size: float, found: Sequence[Excess], measured: Sequence[Measured]
) -> tuple[list[Mistake], tuple[Excess, ...]]:
    """Return which mistakes of this `size` surely leave least, and what the first of them leaves.

    `found` are the excesses of one dtype without any, the worst first. In cells of which none was
    beyond a limit nothing is computed, nor of a mistake that leaves more than another.
    """
    cases = [_Beside(choice, size, found, measured) for choice in choices]
    while True:
        least = min((case.sure for case in cases if case.done), default=math.inf)
        going_on = [case for case in cases if not case.done and case.sure <= least]
        if not going_on:
            break
        min(going_on, key=lambda case: case.sure).look_at_a_cell()
    best = [case for case in cases if case.done and case.sure == least]
    return [case.mistake for case in best], best[0].left_beside_gains()


class _Beside:
    """One mistake laid beside the cells that fail, one after the other."""

    def __init__(
        self, mistake: Mistake, size: float, found: Sequence[Excess], measured: Sequence[Measured]
    ) -> None:
        self.mistake, self.size = mistake, size
        self.measured = list(measured)
        self.format = input_format(measured[0].where.dtype)
        self.sure = 0
        """How much is surely left, as far as is known."""
        self.done = False
        self._laid: dict[int, tuple[Reference, Tensor]] = {}
        self._left: dict[int, list[Excess]] = {}
        failing = {id(one.where): one.where for excess in found for one in excess.evidence}
        # small ones last: they are taken from the end
        self._wheres = sorted(failing.values(), key=_scores, reverse=True)

    def look_at_a_cell(self) -> None:
        """Lay the mistake beside the smallest cell that was not looked at."""
        where = self._wheres.pop()
        there, silent = _with_mistake(where, self.mistake, self.size)
        for i, one in enumerate(self.measured):
            if one.where is where:
                values = one.values
                if one.result in silent:
                    values = values.masked_fill(silent[one.result], 0.0)
                self._laid[i] = there, values
                self.measured[i] = _closer(one, measure(there, one.result, values))
                self._left[i] = [*excesses_in_a_cell(self.measured[i], self.format)]
                self.sure += sum(map(is_sure, self._left[i]))
        if not self._wheres:
            self.done = True
            self._left[len(self.measured)] = excesses_over_draws(self.measured, self.format)
            self.sure += sum(map(is_sure, self._left[len(self.measured)]))

    def left_beside_gains(self) -> tuple[Excess, ...]:
        """Return what is left, the worst first: of a second factor the gain, not all its errors."""
        left = [excess for i in sorted(self._left) for excess in self._left[i]]
        gains = _gains(left)
        for i, (there, values) in self._laid.items():
            one = self.measured[i]
            if one.result in gains:
                factor = 1 + gains[one.result].value
                for where in (one.where, there):
                    again = measure(_times(where, one.result, factor), one.result, values)
                    self.measured[i] = _closer(self.measured[i], again)
        if gains:
            left = [*gains.values(), *excesses(self.measured, self.format)]
        return tuple(sorted(left, key=Excess.excess, reverse=True))


def _scores(where: Reference) -> int:
    shape = where.cell.shape
    return shape.batch * shape.heads * shape.query_len * shape.key_len


def _gains(left: Sequence[Excess]) -> dict[str, Excess]:
    """Return the gain of each result that has one, under N(0, 1) and the surest first."""
    gains: dict[str, Excess] = {}
    for one in sorted(left, key=lambda x: (x.law != "normal", x.error)):
        if one.statistic == "gain" and 1 + one.value > _LEAST_FACTOR:
            gains.setdefault(one.result, one)
    return gains


def _times(where: Reference, result: str, factor: float) -> Reference:
    """Return the cell with a result that is so many times as large, and its rounding too."""
    parts = {"golden": factor, "baseline": factor, "floor": factor**2}
    scaled = {
        part: {**getattr(where, part), result: getattr(where, part)[result] * by}
        for part, by in parts.items()
    }
    return replace(where, **scaled)


def is_sure(left: Excess) -> bool:
    """Whether what is left is more than the mistake's own roundings may make."""
    return left.excess() > _SURELY


def _with_mistake(
    where: Reference, mistake: Mistake, size: float
) -> tuple[Reference, dict[str, Tensor]]:
    """Return the cell with the mistake's results as what is right, and where these say nothing.

    There they are 0. It is the cell itself if it has no such mistake.
    """
    made = next((other for other in mistakes(where, whole=True) if mistake.is_that(other)), None)
    if made is None:
        return where, {}
    golden, silent = where.golden | _results(made, size, where), {}
    baseline, floor = {}, {}
    for name, right in where.golden.items():
        has, had = _norms(golden[name]), _norms(right)
        usual = had.square().mean(2, keepdim=True).sqrt()
        # what overflows, as exp of hidden scores in a backward, is as no formula has it, and where
        # next to nothing is left, terms that cancel err by more than what is left
        least = torch.maximum(had, usual)
        silent[name] = ~(golden[name].abs() <= _OVERFLOWS * least)
        if not made.unwritten:
            silent[name] |= has < had / _OVERFLOWS
        silent[name] &= golden[name] != right
        golden[name] = wrong = golden[name].masked_fill(silent[name], 0.0)
        error = where.baseline[name].double() - right
        error = error.masked_fill(where.baseline[name] == right, 0.0)
        # rounding is of the size of what is rounded; a row of next to nothing, such as dq's of a
        # single key, has an error that tells nothing of a larger one
        larger = (_norms(wrong) / least.clamp(min=1e-300)).clamp(min=1.0)
        share = _norms(error).square().sum(2, keepdim=True) / had.square().sum(2, keepdim=True)
        baseline[name] = wrong + error * larger
        format = FORMATS["fp32" if name == "lse" else input_format(where.dtype)]
        rounding = spacing(wrong.nan_to_num(0, 0, 0), format).square() / 12
        of_row = (share * _norms(wrong).square() / wrong.shape[-1]).nan_to_num(0, 0, 0)
        rounding = torch.maximum(rounding, of_row)
        floor[name] = torch.maximum(where.floor[name] * larger.square(), rounding)
    return replace(where, golden=golden, baseline=baseline, floor=floor), silent


def _norms(x: Tensor) -> Tensor:
    """Return the norm of each row of what is finite, with an axis of 1."""
    return x.nan_to_num(0, 0, 0).square().sum(-1, keepdim=True).sqrt()


def _results(made: Mistake, size: float, where: Reference) -> dict[str, Tensor]:
    if made.results is not None:
        return made.results()
    if made.at is not None:
        return made.at(size)
    assert made.direction is not None
    return {name: where.golden[name] + size * x for name, x in made.direction().items()}


def _closer(right: Measured, wrong: Measured) -> Measured:
    """Return the measurements of the two references, of each head the one that is closer to it."""
    far, near = (one.squared_errors / right.row_noise() for one in (right, wrong))
    takes_BH = near.sum(-1) < far.sum(-1)
    chosen = {
        field.name: torch.where(
            takes_BH.reshape(*takes_BH.shape, *[1] * (getattr(right, field.name).dim() - 2)),
            getattr(wrong, field.name),
            getattr(right, field.name),
        )
        for field in fields(Measured)
        if field.name not in ("where", "result", "values")
    }
    return replace(right, **chosen)
