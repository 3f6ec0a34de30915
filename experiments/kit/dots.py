"""Dots of an experiment's figure: a row a category, a dot a seed, series told apart in grey too.

Leaves out lines over a quantity (`paper_series`), and the style (`paper_style`).
"""

from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes

from stability.report.paper.style import print_styles

__all__ = ["draw_dots"]


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
