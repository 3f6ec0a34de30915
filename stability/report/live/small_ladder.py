"""The ladder small enough for a list of studies: one mark an arm on a log axis, and its number.

Positions are in percent of the width, for the template to draw. Leaves out the chart of the report
(`page.ladder_chart`).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from stability.analysis.ladder import Ladder
from stability.analysis.number_text import EXACT_ZERO, MISSING, scientific, times
from stability.analysis.seed_values import SeedValues
from stability.report.view.error_bars import bar_ends, written_bar
from stability.report.view.ladder import is_candidate, is_unpaired, rungs, rungs_of_each
from stability.report.view.palette import ArmStyle

__all__ = ["Mark", "SmallLadder", "SmallRung", "small_ladder"]

EDGE = 4.0
"""Free room at both ends of the axis, in percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mean over the seeds on the axis, with the ends of its error bar."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallRung:
    """One arm; a mark is None where there is nothing to draw."""

    arm: str
    is_candidate: bool
    colour: str
    early: Mark | None
    last: Mark | None
    text: str
    small: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallLadder:
    """The rungs, what they measure, and where the yardstick stands: a ratio of 1."""

    measure: str
    yardstick_at: float | None
    rungs: tuple[SmallRung, ...]


def small_ladder(ladder: Ladder, styles: Mapping[str, ArmStyle]) -> SmallLadder:
    """Return the ladder in ratio to its yardstick, or as drifts where there is no ratio."""
    shown = rungs_of_each([ladder], lambda row: row.ratio)[0]
    has_ratio = any(rung.measured.early.n or rung.measured.last.n for rung in shown)
    shown = shown if has_ratio else rungs(ladder)
    write = times if has_ratio else scientific
    # this axis has no edge to name an arm at: all unpaired ones have their number alone
    drawn = [rung for rung in shown if not is_unpaired(rung.row)]
    both = [each for rung in drawn for each in (rung.measured.early, rung.measured.last)]
    axis = _LogAxis(both, [1.0] if has_ratio else [])
    small = []
    for rung in shown:
        early, last = rung.measured.early, rung.measured.last
        told = early if early.n else last
        is_zero = rung.row.rel_l2.early.is_zero or rung.row.rel_l2.last.is_zero
        small.append(
            SmallRung(
                arm=rung.row.arm,
                is_candidate=is_candidate(rung.row),
                colour=styles[rung.row.arm].colour,
                early=axis.mark(early) if rung in drawn else None,
                last=axis.mark(last) if rung in drawn else None,
                text=EXACT_ZERO if is_zero else write(told.mean) if told.n else MISSING,
                small=written_bar(told, write),
            )
        )
    unit = f"drift in units of {ladder.yardstick}'s" if has_ratio else "drift (relative L2)"
    return SmallLadder(
        measure=f"{unit}; hollow and number: step {ladder.early_step}, filled: {ladder.last_step}",
        yardstick_at=axis.place(1.0) if has_ratio else None,
        rungs=tuple(small),
    )


class _LogAxis:
    """A log axis over all that is to be drawn, from 0 to 100 percent."""

    def __init__(self, drawn: Iterable[SeedValues], also: list[float]) -> None:
        points = [point for each in drawn for point in (*bar_ends(each), each.mean)]
        logs = [math.log10(point) for point in [*points, *also] if 0 < point < math.inf]
        self._low = min(logs, default=0.0)
        self._width = max(logs, default=0.0) - self._low or 1.0

    def place(self, value: float) -> float:
        share = (math.log10(value) - self._low) / self._width
        return round(EDGE + (100 - 2 * EDGE) * share, 2)

    def mark(self, values: SeedValues) -> Mark | None:
        low, high = bar_ends(values)
        if not values.n or not 0 < low <= high < math.inf:
            return None
        return Mark(low=self.place(low), mean=self.place(values.mean), high=self.place(high))
