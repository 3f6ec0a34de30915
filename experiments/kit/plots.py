"""Dots of an experiment's figure: a row a category, a dot a seed, series told apart in grey too.

Leaves out lines over a quantity (`paper_series`), and the style (`paper_style`).

Lines of an experiment's figure: a mean over seeds with the seeds' range, told apart in grey too.

Leaves out axes, labels and the style they are drawn in (`paper_style`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes

from stability.report.paper.style import print_styles

__all__ = ["draw_dots", "draw_series", "rows_by"]


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


def draw_series(axes: Axes, series: Mapping[str, ByPlace], *, first_style: int = 0) -> None:
    """Draw each of `series`, values of the seeds by place on x, as a line with a label.

    A whisker spans the smallest to the largest seed. What is not finite leaves a gap. Styles are
    the report's, from `first_style` on.
    """
    names = [f"style {index}" for index in range(first_style)] + list(series)
    styles = print_styles(names)
    for name, by_place in series.items():
        style = styles[name]
        places = sorted(by_place)
        means, below, above = [], [], []
        for place in places:
            finite = [value for value in by_place[place] if math.isfinite(value)]
            mean = sum(finite) / len(finite) if finite else math.nan
            means.append(mean)
            # a mean of equal values may miss them by an ULP
            below.append(max(0.0, mean - min(finite)) if finite else 0.0)
            above.append(max(0.0, max(finite) - mean) if finite else 0.0)
        axes.errorbar(
            places,
            means,
            yerr=[below, above],
            color=style.colour,
            linestyle=style.dash,
            marker=style.marker,
            markersize=3.5,
            elinewidth=0.8,
            capsize=1.5,
            label=name,
        )
    axes.grid(True, axis="both")


def rows_by(
    rows: Sequence[Mapping[str, Any]], place: str, value: str, **only: object
) -> dict[float, list[float]]:
    """Return `value` of an experiment's rows by `place`, as `draw_series` wants a line.

    `only` names the values that other columns must have.
    """
    found: dict[float, list[float]] = {}
    for row in rows:
        if all(row[name] == wanted for name, wanted in only.items()):
            found.setdefault(float(row[place]), []).append(float(row[value]))
    return found
