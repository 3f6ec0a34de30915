"""A recorded waterfall as a figure for a paper: which rounding point makes how much of the error.

The left panel rounds one point at a time, the right one all but one. Both show the error as a share
of the whole profile's, so that bars start at 0 and can be compared. Leaves out the measuring
(`probe.microbenchmark`).
"""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, WaterfallStep
from stability.report.paper.files import Cell, Table
from stability.report.paper.style import GREY, new_figure, shown
from stability.report.view.palette import OKABE_ITO

__all__ = ["draw_waterfall", "waterfall_table"]

_HATCHES = ("", "/////", "", "....")
_PANELS = {
    "lowered": "rounded alone:\nits own error",
    "raised": "all but it rounded:\nwhat remains",
}


def draw_waterfall(record: WaterfallRecord, width: str) -> Figure:
    """Return the figure: left each point lowered alone, right each raised alone."""
    points = [step["point"] for step in record.steps if step["change"] == "lowered"]
    whole = _whole(record)
    figure = new_figure(width, 1.2 + 0.26 * len(points))
    panels = figure.subplots(1, 2, sharey=True)
    for axes, (change, title) in zip(panels, _PANELS.items(), strict=True):
        _draw(axes, _steps(record, change), whole)
        axes.set_title(title)
    panels[0].set_yticks(range(len(points)), [shown(point, 18) for point in points])
    panels[0].set_ylim(len(points) - 0.5, -0.5)
    figure.supxlabel(f"relative error, as a share of that of\n{shown(record.name, 48)}", fontsize=8)
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def waterfall_table(run: RunPaths, record: WaterfallRecord) -> Table:
    """Return the numbers of the figure: the error of each result at each step, and its share."""
    whole = _whole(record)
    start = (run.arm, run.seed, record.name, record.layer, record.step)
    rows: list[tuple[Cell, ...]] = [
        (*start, step["change"], step["point"], step["format"], what, error, share)
        for step in record.steps
        for what, error in step["errors"].items()
        for share in [_share(error, whole[what])]
    ]
    columns = ("arm", "seed", "profile", "layer", "step", "change", "point", "format")
    return Table((*columns, "result", "relative_error", "share"), rows)


def _whole(record: WaterfallRecord) -> Mapping[str, float]:
    """Return the errors with every point rounded as the profile says."""
    return next(step["errors"] for step in record.steps if step["change"] == "none")


def _steps(record: WaterfallRecord, change: str) -> list[WaterfallStep]:
    return [step for step in record.steps if step["change"] == change]


def _share(error: float, whole: float) -> float:
    return error / whole if whole else math.nan


def _draw(axes: Axes, steps: list[WaterfallStep], whole: Mapping[str, float]) -> None:
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle="--", zorder=0)
    thickness = 0.8 / len(whole)
    for index, what in enumerate(whole):
        shares = [_share(step["errors"][what], whole[what]) for step in steps]
        axes.barh(
            [place + (index - (len(whole) - 1) / 2) * thickness for place in range(len(steps))],
            [share if math.isfinite(share) else 0.0 for share in shares],
            height=thickness,
            color=OKABE_ITO[index % len(OKABE_ITO)],
            hatch=_HATCHES[index % len(_HATCHES)],
            edgecolor="white",
            linewidth=0.3,
            label=what,
        )
    axes.set_xlim(0, None)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=" %"))
    axes.locator_params(axis="x", nbins=3)
    axes.tick_params(axis="y", length=0)
