"""Draws what the figures of experiments show: dots by category, and lines over a quantity.

Both show all seeds. Series differ in marker as well as in colour, and lines in their dashes too, so
that they can be told apart in grey print. The experiment chooses labels and the size of the figure;
markers, dashes and colours come from `stability.report.paper.style`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes

from stability.report.paper.style import log_axis, print_styles

__all__ = ["draw_dots", "draw_series"]


def draw_dots(axes: Axes, series: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw a dot for each value of `series`, with the categories as rows, the first one on top.

    `series` maps the label of a series to its categories, and a category to one value per seed.
    """
    categories = list(dict.fromkeys(name for values in series.values() for name in values))
    styles = print_styles(list(series))
    for index, (label, by_category) in enumerate(series.items()):
        # Rows are 1 apart. The series share the middle 0.7 of a row, so that none hides another.
        shift = 0.7 * ((index + 0.5) / len(series) - 0.5)
        dots = [
            (value, categories.index(name) + shift)
            for name, values in by_category.items()
            for value in values
        ]
        axes.plot(
            [value for value, _ in dots],
            [place for _, place in dots],
            linestyle="",
            marker=styles[label].marker,
            markersize=2.5,
            color=styles[label].colour,
            label=label,
        )
    axes.set_yticks(range(len(categories)), categories)
    axes.invert_yaxis()


ByPlace = Mapping[float, Sequence[float]]
"""Maps a position on the x axis to one value per seed."""


def draw_series(
    axes: Axes,
    series: Mapping[str, ByPlace],
    *,
    x: str = "",
    y: str = "",
    log: Literal["", "x", "y", "xy"] = "",
    first_style: int = 0,
) -> None:
    """Draw each of `series` as a labelled line: the mean over the seeds at each position on x.

    A whisker at each position spans the smallest to the largest value. Values that are not finite
    are left out, and a position without finite values leaves a gap. `x` and `y` are axis labels;
    `log` names the axes that are logarithmic. The first series is drawn in the report's style
    number `first_style`, counted from 0: pass the number of series that are drawn elsewhere.
    """
    # Styles are dealt out in order, so placeholders take those before `first_style`.
    names = [f"style {index}" for index in range(first_style)] + list(series)
    styles = print_styles(names)
    for name, by_place in series.items():
        style = styles[name]
        places = sorted(by_place)
        spans = [_mean_and_range(by_place[place]) for place in places]
        axes.errorbar(
            places,
            [mean for mean, _, _ in spans],
            yerr=[[below for _, below, _ in spans], [above for _, _, above in spans]],
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            markersize=3.5,
            elinewidth=0.8,
            capsize=1.5,
            label=name,
        )
    axes.grid(True, axis="both")
    if "x" in log:
        log_axis(axes, "x")
    if "y" in log:
        log_axis(axes, "y")
    if x:
        axes.set_xlabel(x)
    if y:
        axes.set_ylabel(y)


def _mean_and_range(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of the finite values, and how far they extend below and above it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan, 0.0, 0.0
    mean = sum(finite) / len(finite)
    # The computed mean of equal values may differ from them by an ULP, and `errorbar` must not be
    # given a negative length.
    return mean, max(0.0, mean - min(finite)), max(0.0, max(finite) - mean)
