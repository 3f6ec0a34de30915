"""The ladder for a paper: each arm's drift at the early and the last step, on one log axis.

Leaves out where the numbers come from (`analysis.ladder`).
"""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stability.analysis.ladder import INDEPENDENT_AXES, Ladder, Row
from stability.analysis.number_text import EXACT_ZERO, scientific
from stability.analysis.seed_values import SeedValues
from stability.config.schema import BASELINE
from stability.report.paper.style import (
    GREY,
    PrintStyle,
    log_axis,
    new_figure,
    print_styles,
    shown,
)
from stability.report.paper.table import Cell, Table
from stability.report.view.whiskers import LEVEL, ends

__all__ = ["bar_of", "draw_ladder", "ladder_table"]

OFF_SCALE = 10
"""An arm this many times beyond the largest paired drift is named at the edge instead of drawn."""


def draw_ladder(ladder: Ladder, arms: Sequence[str], width: str) -> Figure:
    """Return the picture: hollow is early, filled is last, bars are intervals or ranges.

    `arms` are the study's in its own order, which gives them their colours. ValueError if no arm
    has a drift on record.
    """
    rows = [row for row in ladder.rows if row.arm != BASELINE]
    if not any(spread.n for row in rows for spread in _ends(row)):
        raise ValueError(
            "draw_ladder: study must have a drift on record, has none; `stability run` goes on "
            "with it"
        )
    figure = new_figure(width, 1.1 + 0.26 * len(rows))
    axes = figure.add_subplot()
    styles = print_styles(arms)
    limit = _limit(rows)
    for place, row in enumerate(rows):
        _draw_row(axes, row, place, styles[row.arm], limit)
    yardstick = ladder.row(ladder.yardstick)
    for spread, dash in zip(_ends(yardstick) if yardstick else (), (":", "--"), strict=False):
        if _on_log(spread):
            axes.axvline(spread.mean, color=GREY, linewidth=0.8, linestyle=dash, zorder=0)
    log_axis(axes, "x")
    names = [_name(row, len(ladder.seeds), 18 if width == "column" else 40) for row in rows]
    axes.set_yticks(range(len(rows)), names, linespacing=0.95)
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(f"drift from the baseline (relative L2)\n{_meaning(rows)}")
    figure.legend(handles=_handles(ladder), loc="outside upper center", ncols=3, columnspacing=1)
    return figure


def ladder_table(ladder: Ladder) -> Table:
    """Return the numbers of the picture: a row for each mean with its bar, and for each seed."""
    found: list[tuple[Cell, ...]] = []
    for row in ladder.rows:
        for when, step, spread in zip(
            ("early", "last"), (ladder.early_step, ladder.last_step), _ends(row), strict=True
        ):
            low, high, bar = bar_of(spread)
            start = (row.arm, row.axis, row.change, row.state, when, step)
            if spread.n:
                found.append((*start, "mean", spread.mean, low, high, bar))
            found += [
                (*start, str(seed), value, "", "", "") for seed, value in spread.per_seed.items()
            ]
    columns = ("arm", "axis", "change", "state", "when", "step", "seed", "rel_l2")
    return Table((*columns, "bar_low", "bar_high", "bar"), found)


def bar_of(spread: SeedValues) -> tuple[float, float, str]:
    """Return the ends of a mean's bar and what they are: an interval with 5 seeds, else a range."""
    if not math.isnan(spread.interval.low):
        return *ends(spread), f"{100 * LEVEL:.0f} % interval"
    return *ends(spread), "range of the seeds" if spread.n > 1 else "one seed"


def _ends(row: Row) -> tuple[SeedValues, SeedValues]:
    return row.rel_l2.early, row.rel_l2.last


def _on_log(spread: SeedValues) -> bool:
    return spread.n > 0 and math.isfinite(spread.mean) and spread.mean > 0


def _limit(rows: Sequence[Row]) -> float:
    paired = [
        spread.high
        for row in rows
        if row.axis not in INDEPENDENT_AXES
        for spread in _ends(row)
        if _on_log(spread)
    ]
    return OFF_SCALE * max(paired) if paired else math.inf


def _draw_row(axes: Axes, row: Row, place: int, style: PrintStyle, limit: float) -> None:
    note, side = _note(row, limit)
    if note:
        at = {"left": 0.02, "right": 0.98}[side]
        place_at = axes.get_yaxis_transform()
        text = axes.text(at, place, note, transform=place_at, ha=side, va="center", fontsize=7)
        text.set(color=GREY, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    ends = [spread for spread in _ends(row) if _on_log(spread)]
    if side == "right" or not ends:
        return
    means = [spread.mean for spread in ends]
    axes.plot(means, [place] * len(means), color=style.colour, linewidth=0.8, alpha=0.5)
    for spread, face in zip(_ends(row), ("white", style.colour), strict=True):
        if not _on_log(spread):
            continue
        low, high, _ = bar_of(spread)
        low = low if low > 0 else spread.mean  # a log axis has no 0 to reach to
        axes.errorbar(
            spread.mean,
            place,
            xerr=[[spread.mean - low], [high - spread.mean]],
            color=style.colour,
            marker=style.marker,
            markersize=5,
            markerfacecolor=face,
            markeredgewidth=1,
            elinewidth=1,
            capsize=2,
        )


def _note(row: Row, limit: float) -> tuple[str, str]:
    """Return what stands in a row that can't be drawn, and at which edge."""
    early, last = _ends(row)
    found = [spread for spread in (early, last) if spread.n]
    if not found:
        return f"no drift on record: {row.state}", "left"
    if any(spread.mean > limit for spread in found):
        far = " and ".join(scientific(spread.mean) for spread in found)
        return f"{far}, off the scale \N{BLACK RIGHT-POINTING SMALL TRIANGLE}", "right"
    if early.is_zero or last.is_zero:
        return EXACT_ZERO, "left"
    return "", "left"


def _name(row: Row, seeds: int, most: int) -> str:
    """Return the arm's name, and below it what is amiss with its runs."""
    n = row.rel_l2.last.n
    state = "" if row.state in ("finished", "missing", "running") else row.state
    if n and n < seeds:
        state = ", ".join(filter(None, (state, f"{n} of {seeds} seeds")))
    return "\n".join(filter(None, (shown(row.arm, most), state)))


def _meaning(rows: Sequence[Row]) -> str:
    spreads = [spread for row in rows for spread in _ends(row) if spread.n]
    kinds = {bar_of(spread)[2] for spread in spreads}
    most = max(spread.n for spread in spreads)
    seeds = f"{most} seeds" if most > 1 else "one seed"
    if kinds == {"90 % interval"}:
        return f"mean and 90 % interval, {seeds}"
    if "90 % interval" in kinds:
        return f"mean and 90 % interval; below {seeds}: range"
    return f"mean and range of {seeds}" if most > 1 else "one seed, so no bars"


def _handles(ladder: Ladder) -> list[Line2D]:
    mark = {"color": GREY, "marker": "o", "markersize": 5, "linestyle": ""}
    handles = [
        Line2D([], [], **mark, markerfacecolor="white", label=f"step {ladder.early_step}"),
        Line2D([], [], **mark, label=f"step {ladder.last_step}"),
    ]
    if ladder.row(ladder.yardstick):
        name = f"{shown(ladder.yardstick, 18)}, yardstick"
        handles.append(Line2D([], [], color=GREY, linewidth=0.8, linestyle="--", label=name))
    return handles
