"""The ladder as a figure for a paper: each arm at the early and at the last step, on one log axis.

Leaves out which arms have a place on the axis (`view.ladder`).
"""

from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from stability.analysis.ladder import Ladder, Row
from stability.analysis.number_text import EXACT_ZERO, scientific
from stability.report.paper.figure_options import NothingToDrawError
from stability.report.paper.files import Cell, Table
from stability.report.paper.style import (
    GREY,
    PrintStyle,
    log_axis,
    new_figure,
    print_styles,
    shown,
)
from stability.report.view.error_bars import bar_ends, bar_kind
from stability.report.view.ladder import Rung, on_log_axis, rungs

__all__ = ["draw_ladder", "ladder_table"]


def draw_ladder(ladder: Ladder, arms: Sequence[str], width: str) -> Figure:
    """Return the figure: hollow is early, filled is last; error bars as in `view.error_bars`.

    `arms` are the study's in its own order, which gives them their colours. ValueError if no arm
    has a drift on record.
    """
    drawn = rungs(ladder)
    if all(rung.off_axis == "missing" for rung in drawn):
        raise NothingToDrawError(
            "draw_ladder: study must have a drift on record, has none; `stability run` goes on "
            "with it"
        )
    figure = new_figure(width, 1.1 + 0.26 * len(drawn))
    axes = figure.add_subplot()
    styles = print_styles(arms)
    for place, rung in enumerate(drawn):
        _draw_arm(axes, rung, place, styles[rung.row.arm])
    yardstick = ladder.row(ladder.yardstick)
    for values, is_early in on_log_axis(yardstick.rel_l2) if yardstick else ():
        dash = ":" if is_early else "--"
        axes.axvline(values.mean, color=GREY, linewidth=0.8, linestyle=dash, zorder=0)
    log_axis(axes, "x")
    most = 18 if width == "column" else 40
    names = [_name(rung.row, len(ladder.seeds), most) for rung in drawn]
    axes.set_yticks(range(len(drawn)), names, linespacing=0.95)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel(f"drift from the baseline (relative L2)\n{_meaning(drawn)}")
    figure.legend(handles=_handles(ladder), loc="outside upper center", ncols=3, columnspacing=1)
    return figure


def ladder_table(ladder: Ladder) -> Table:
    """Return the numbers of the figure: a row for each mean with its bar, and for each seed."""
    found: list[tuple[Cell, ...]] = []
    for row in ladder.rows:
        for when, step, values in (
            ("early", ladder.early_step, row.rel_l2.early),
            ("last", ladder.last_step, row.rel_l2.last),
        ):
            start = (row.arm, row.axis, row.change, row.state, when, step)
            if values.n:
                found.append((*start, "mean", values.mean, *bar_ends(values), bar_kind(values)))
            found += [
                (*start, str(seed), value, "", "", "") for seed, value in values.per_seed.items()
            ]
    columns = ("arm", "axis", "change", "state", "when", "step", "seed", "rel_l2")
    return Table((*columns, "bar_low", "bar_high", "bar"), found)


def _draw_arm(axes: Axes, rung: Rung, place: int, style: PrintStyle) -> None:
    if rung.off_axis:
        is_right = rung.off_axis == "beyond"
        text = axes.text(
            0.98 if is_right else 0.02,
            place,
            _note(rung),
            transform=axes.get_yaxis_transform(),
            ha="right" if is_right else "left",
            va="center",
            fontsize=7,
        )
        text.set(color=GREY, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})
    if not rung.marks:
        return
    means = [values.mean for values, _ in rung.marks]
    axes.plot(means, [place] * len(means), color=style.colour, linewidth=0.8, alpha=0.5)
    for values, is_early in rung.marks:
        low, high = bar_ends(values)
        low = low if low > 0 else values.mean  # a log axis has no 0 to reach to
        axes.errorbar(
            values.mean,
            place,
            xerr=[[values.mean - low], [high - values.mean]],
            color=style.colour,
            marker=style.marker,
            markersize=5,
            markerfacecolor="white" if is_early else style.colour,
            markeredgewidth=1,
            elinewidth=1,
            capsize=2,
        )


def _note(rung: Rung) -> str:
    """Return what stands at the edge in the row of an arm that is not drawn."""
    if rung.off_axis == "missing":
        return f"no drift on record: {rung.row.state}"
    if rung.off_axis == "zero":
        return EXACT_ZERO
    far = " and ".join(map(scientific, rung.means))
    return f"{far}, off the scale \N{BLACK RIGHT-POINTING SMALL TRIANGLE}"


def _name(row: Row, seeds: int, most: int) -> str:
    """Return the arm's name, and below it what is amiss with its runs."""
    n = row.rel_l2.last.n
    state = "" if row.state in ("finished", "missing", "running") else row.state
    if n and n < seeds:
        state = ", ".join(filter(None, (state, f"{n} of {seeds} seeds")))
    return "\n".join(filter(None, (shown(row.arm, most), state)))


def _meaning(drawn: Sequence[Rung]) -> str:
    both = [each for rung in drawn for each in (rung.measured.early, rung.measured.last)]
    kinds = {bar_kind(each) for each in both if each.n}
    most = max(each.n for each in both)
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
