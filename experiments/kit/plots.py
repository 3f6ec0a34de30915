"""Draws the figures of experiments: dots by category, and lines over a quantity, with all seeds.

Series differ in marker and dash as well as in colour, so that a print in grey is read too. Labels
and the size of the figure are the experiment's; the style is `stability.report.paper.style`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal

from matplotlib.axes import Axes

from stability.report.paper.style import log_axis, print_styles

__all__ = ["draw_dots", "draw_series"]


def draw_dots(axes: Axes, series: Mapping[str, Mapping[str, Sequence[float]]]) -> None:
    """Draw each of `series`, values of the seeds by category, the first category on top."""
    categories = list(dict.fromkeys(name for values in series.values() for name in values))
    styles = print_styles(list(series))
    for index, (label, by_category) in enumerate(series.items()):
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


def draw_series(
    axes: Axes,
    series: Mapping[str, ByPlace],
    *,
    x: str = "",
    y: str = "",
    log: Literal["", "x", "y", "xy"] = "",
    first_style: int = 0,
) -> None:
    """Draw each of `series`, values of the seeds by place on x, as a line with a label.

    The line is the mean, and a whisker spans the smallest to the largest seed. What is not finite
    leaves a gap. `x` and `y` label the axes; `log` names those that are logarithmic.
    Styles are the report's, from `first_style` on.
    """
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
    """Return the mean of the finite values, and how far they go below and above it."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite:
        return math.nan, 0.0, 0.0
    mean = sum(finite) / len(finite)
    # The mean of equal values may miss them by an ULP, and a whisker must not be negative.
    return mean, max(0.0, mean - min(finite)), max(0.0, max(finite) - mean)
