"""The ladder small enough for a list of studies: one mark an arm on a log axis, and its number.

Positions are in percent of the width, for the template to draw. Leaves out the chart of the report
(`ladder_chart`).
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from stability.analysis.ladder import INDEPENDENT_AXES, EarlyLast, Ladder
from stability.analysis.number_text import EXACT_ZERO, MISSING, scientific, times
from stability.analysis.seed_values import SeedValues
from stability.config.schema import BASELINE
from stability.report.view.palette import ArmStyle
from stability.report.view.whiskers import ends, written_ends

__all__ = ["Mark", "Rung", "SmallLadder", "small_ladder"]

EDGE = 4.0
"""Free room at both ends of the axis, in percent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A mean over the seeds on the axis, with the ends of its whisker."""

    low: float
    mean: float
    high: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
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
    rungs: tuple[Rung, ...]


def small_ladder(ladder: Ladder, styles: Mapping[str, ArmStyle]) -> SmallLadder:
    """Return the ladder in ratio to its yardstick, or as drifts where there is no ratio."""
    rows = [row for row in ladder.rows if row.arm != BASELINE]
    has_ratio = any(row.ratio.early.n or row.ratio.last.n for row in rows)
    # arms with other initial weights lie decades away: as in the report they are named, not drawn
    drawn = {row.arm for row in rows if row.axis not in INDEPENDENT_AXES}
    measured = {row.arm: row.ratio if has_ratio else row.rel_l2 for row in rows}
    scale = _Scale([measured[arm] for arm in drawn], [1.0] if has_ratio else [])
    rungs = []
    for row in rows:
        both = measured[row.arm]
        shown = both.early if both.early.n else both.last
        is_zero = row.rel_l2.early.is_zero or row.rel_l2.last.is_zero
        write = times if has_ratio else scientific
        rungs.append(
            Rung(
                arm=row.arm,
                is_candidate=row.axis == "attention",
                colour=styles[row.arm].colour,
                early=scale.mark(both.early) if row.arm in drawn else None,
                last=scale.mark(both.last) if row.arm in drawn else None,
                text=EXACT_ZERO if is_zero else _text(shown, write),
                small=written_ends(shown, write),
            )
        )
    unit = f"drift in units of {ladder.yardstick}'s" if has_ratio else "drift (relative L2)"
    return SmallLadder(
        measure=f"{unit}; hollow and number: step {ladder.early_step}, filled: {ladder.last_step}",
        yardstick_at=scale.place(1.0) if has_ratio else None,
        rungs=tuple(rungs),
    )


def _text(spread: SeedValues, write: Callable[[float], str]) -> str:
    return write(spread.mean) if spread.n else MISSING


class _Scale:
    """A log axis over all that is to be drawn, from 0 to 100 percent."""

    def __init__(self, measured: Iterable[EarlyLast], also: list[float]) -> None:
        spreads = [spread for each in measured for spread in (each.early, each.last)]
        shown = [value for spread in spreads for value in (*ends(spread), spread.mean)]
        logs = [math.log10(value) for value in [*shown, *also] if 0 < value < math.inf]
        self._low = min(logs, default=0.0)
        self._width = max(logs, default=0.0) - self._low or 1.0

    def place(self, value: float) -> float:
        share = (math.log10(value) - self._low) / self._width
        return round(EDGE + (100 - 2 * EDGE) * share, 2)

    def mark(self, spread: SeedValues) -> Mark | None:
        low, high = ends(spread)
        if not spread.n or not 0 < low <= high < math.inf:
            return None
        return Mark(low=self.place(low), mean=self.place(spread.mean), high=self.place(high))
