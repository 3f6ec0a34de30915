"""Dots stand in the row of their category, the first on top, each series in a lane of its own."""

from experiments.kit.plots import draw_dots
from stability.report.paper.style import new_figure, paper_style


def test_dots_stand_at_their_category():
    with paper_style():
        axes = new_figure("column", 2.0).add_subplot()
        draw_dots(axes, {"one": {"a": [1.0, 2.0], "b": [3.0]}, "other": {"b": [4.0]}})
        one, other = axes.lines
        labels = [label.get_text() for label in axes.get_yticklabels()]
    assert labels == ["a", "b"]
    assert axes.yaxis_inverted()
    assert list(one.get_xdata()) == [1.0, 2.0, 3.0]
    assert [round(float(y)) for y in one.get_ydata()] == [0, 0, 1]
    assert [round(float(y)) for y in other.get_ydata()] == [1]
    assert one.get_ydata()[2] < other.get_ydata()[0]
    assert one.get_marker() != other.get_marker()
