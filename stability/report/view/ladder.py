"""The ladder as every view shows it: each arm's numbers, and its place on a log axis.

A picture of the ladder has one log axis: an arm's drift, or its ratio to the yardstick's, at the
early and at the last step. Arms that start from independently drawn weights (the axes `seed` and
`init`) lie decades away and would press all others into one spot. So the paired arms set the scale,
and an arm far beyond them is named at the edge instead of drawn. Leaves out how a mark, a cell or a
line of text is drawn, which is each view's own.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from stability.analysis.ladder import INDEPENDENT_AXES, EarlyLast, Ladder, Row
from stability.analysis.number_text import finely, plain, scientific, times
from stability.analysis.seed_values import SeedValues
from stability.analysis.study_records import RecordedArm
from stability.config.schema import BASELINE

__all__ = [
    "AxisValue",
    "Number",
    "Rung",
    "has_held_out",
    "is_candidate",
    "is_unpaired",
    "numbers",
    "on_log_axis",
    "rungs",
    "rungs_of_each",
]

OFF_SCALE = 10
"""An arm this many times beyond the largest paired one is off the scale."""
OffAxis: TypeAlias = Literal["", "beyond", "zero", "missing"]


class Number(NamedTuple):
    """A number of an arm over the seeds, and how it is written."""

    values: SeedValues
    write: Callable[[float], str]


class AxisValue(NamedTuple):
    """A positive, finite mean over the seeds at one of the ladder's two steps."""

    values: SeedValues
    is_early: bool


@dataclass(frozen=True, slots=True)
class Rung:
    """One arm in a picture of the ladder."""

    row: Row
    measured: EarlyLast
    """What the axis shows: the arm's drift, or its ratio to the yardstick's."""
    off_axis: OffAxis
    """Why some value of the arm has no place on the axis; an arm `beyond` is not drawn at all."""

    @property
    def means(self) -> list[float]:
        """The means on record, the early one first, whether or not the axis can show them."""
        return [each.mean for each in (self.measured.early, self.measured.last) if each.n]

    @property
    def marks(self) -> list[AxisValue]:
        """The values to draw, the early one first."""
        return [] if self.off_axis == "beyond" else on_log_axis(self.measured)


def rungs(ladder: Ladder) -> list[Rung]:
    """Return the arms of a picture of drifts, without the baseline."""
    return rungs_of_each([ladder], lambda row: row.rel_l2)[0]


def rungs_of_each(
    ladders: Iterable[Ladder], measure: Callable[[Row], EarlyLast]
) -> list[list[Rung]]:
    """Return the arms of a picture of several ladders, whose axis shows `measure` of each row."""
    shown = [
        [(row, measure(row)) for row in ladder.rows if row.arm != BASELINE] for ladder in ladders
    ]
    paired = [both for pairs in shown for row, both in pairs if not is_unpaired(row)]
    highest = [values.high for both in paired for values, _ in on_log_axis(both)]
    limit = OFF_SCALE * max(highest, default=math.inf)
    return [[Rung(row, both, _off_axis(row, both, limit)) for row, both in each] for each in shown]


def on_log_axis(both: EarlyLast) -> list[AxisValue]:
    """Return those of the two values that a log axis can show."""
    found = (AxisValue(both.early, True), AxisValue(both.last, False))
    return [each for each in found if each.values.n and 0 < each.values.mean < math.inf]


def is_unpaired(arm: Row | RecordedArm) -> bool:
    """Whether the arm's initial weights were drawn independently of the baseline's."""
    return arm.axis in INDEPENDENT_AXES


def is_candidate(arm: Row | RecordedArm) -> bool:
    """Whether the arm changes the attention; every other one is a control."""
    return arm.axis == "attention"


def has_held_out(ladder: Ladder) -> bool:
    """Whether any arm has a loss on held-out text."""
    return any(row.held_out_loss.n for row in ladder.rows)


LOSSES = ("final_loss", "held_out_loss")
"""The numbers of a row that the baseline has too."""


def numbers(row: Row) -> Mapping[str, Number]:
    """Return the numbers of an arm's row in a table; all but the losses are empty for the baseline.

    Drifts are relative L2, W1 is in units of the weights, ratios are to the yardstick.
    """
    found = {
        "final_loss": Number(row.final_loss, plain),
        "held_out_loss": Number(row.held_out_loss, finely),
        "drift_early": Number(row.rel_l2.early, scientific),
        "drift_last": Number(row.rel_l2.last, scientific),
        "w1_last": Number(row.w1.last, scientific),
        "ratio_early": Number(row.ratio.early, times),
        "ratio_last": Number(row.ratio.last, times),
    }
    if row.arm == BASELINE:
        found |= {n: Number(SeedValues(), plain) for n in found if n not in LOSSES}
    return found


def _off_axis(row: Row, both: EarlyLast, limit: float) -> OffAxis:
    if any(each.n and each.mean > limit for each in (both.early, both.last)):
        return "beyond"
    if row.rel_l2.early.is_zero or row.rel_l2.last.is_zero:
        return "zero"
    return "" if both.early.n or both.last.n else "missing"
