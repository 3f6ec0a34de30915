"""The figures of experiments show every seed, and nothing that is no number."""

import math

import pytest
from matplotlib.colors import to_hex

from experiments.kit.plots import draw_dots, draw_series
from experiments.kit.rows import values_by
from stability.report.paper.style import new_figure, paper_style

ROWS = [
    {"length": 64, "error": 1.0, "seed": 0, "arm": "flash"},
    {"length": 64, "error": 4.0, "seed": 1, "arm": "flash"},
    {"length": 32, "error": 2, "seed": 0, "arm": "flash"},
    {"length": 32, "error": 9.0, "seed": 0, "arm": "baseline"},
]


def _axes(series, **options):
    with paper_style():
        axes = new_figure("column", 2).add_subplot()
        draw_series(axes, series, **options)
    return axes


def _whiskers(axes, line=0):
    (bars,) = axes.containers[line].lines[2]
    return [[end[1] for end in segment] for segment in bars.get_segments()]


def _line(axes, line=0):
    drawn = axes.containers[line].lines[0]
    return drawn.get_xdata().tolist(), drawn.get_ydata().tolist()


def test_values_by_keeps_every_seed_and_only_the_rows_asked_for():
    assert values_by(ROWS, "length", "error", arm="flash") == {64.0: [1.0, 4.0], 32.0: [2.0]}
    assert values_by(ROWS, "length", "error")[32.0] == [2.0, 9.0]
    assert values_by(ROWS, "length", "error", arm="none") == {}
    with pytest.raises(KeyError, match="colour"):
        values_by(ROWS, "length", "error", colour="red")


def test_line_is_the_mean_in_order_of_x_and_whiskers_span_the_seeds():
    axes = _axes({"flash": {64.0: [1.0, 4.0, 4.0], 32.0: [2.0]}})
    assert _line(axes) == ([32.0, 64.0], [2.0, 3.0])
    assert _whiskers(axes) == [[2.0, 2.0], [1.0, 4.0]]


def test_what_is_not_finite_leaves_a_gap_and_takes_no_part_in_a_mean():
    axes = _axes({"a": {1.0: [math.nan, math.inf], 2.0: [math.nan, 1.0, 3.0], 3.0: [5.0]}})
    x, y = _line(axes)
    assert x == [1.0, 2.0, 3.0]
    assert math.isnan(y[0])
    assert y[1:] == [2.0, 5.0]
    assert _whiskers(axes)[1:] == [[1.0, 3.0], [5.0, 5.0]]


def test_lines_differ_in_colour_marker_and_dash_and_have_their_names():
    axes = _axes({name: {1.0: [1.0], 2.0: [2.0]} for name in ("a", "b", "c")})
    lines = [container.lines[0] for container in axes.containers]
    assert [container.get_label() for container in axes.containers] == ["a", "b", "c"]
    assert len({to_hex(line.get_color()) for line in lines}) == 3
    assert len({line.get_marker() for line in lines}) == 3
    assert len({str(line._unscaled_dash_pattern) for line in lines}) == 3


def test_a_second_panel_goes_on_with_the_styles():
    both = _axes({"a": {1.0: [1.0]}, "b": {1.0: [1.0]}})
    later = _axes({"b": {1.0: [1.0]}}, first_style=1)
    styles = [
        (line.get_color(), line.get_marker())
        for line in (both.containers[1].lines[0], later.containers[0].lines[0])
    ]
    assert styles[0] == styles[1]
    assert styles[0][0] != both.containers[0].lines[0].get_color()


def test_equal_values_have_a_whisker_of_no_length():
    value = 0.1
    assert sum([value] * 3) / 3 > value  # else this would show nothing
    with paper_style():
        axes = new_figure("column", 2.0).add_subplot()
        draw_series(axes, {"equal": {1.0: [value] * 3}})
        (bars,) = axes.containers
    assert bars.lines[2][0].get_segments()[0][:, 1].max() < value + 1e-9


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


def test_a_line_without_a_point_is_no_error():
    axes = _axes({"none": {}, "one": {1.0: [2.0]}})
    assert _line(axes, 1) == ([1.0], [2.0])
