"""A whisker of seeds that all gave one value has no length, whatever the mean rounds to."""

from experiments.kit.plots import draw_series
from stability.report.paper.style import new_figure, paper_style


def test_equal_values_have_a_whisker_of_no_length():
    value = 0.1
    assert sum([value] * 3) / 3 > value  # else this would show nothing
    with paper_style():
        axes = new_figure("column", 2.0).add_subplot()
        draw_series(axes, {"equal": {1.0: [value] * 3}})
        (bars,) = axes.containers
    assert bars.lines[2][0].get_segments()[0][:, 1].max() < value + 1e-9
