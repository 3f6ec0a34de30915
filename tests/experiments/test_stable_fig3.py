"""Flash against baseline attention by format: the direction, at a size of seconds."""

import pytest

from experiments.kit.rows import by_seed
from stability.report.paper.style import paper_style


@pytest.fixture
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


def test_difference_falls_with_mantissa_bits(experiment, found):
    named_fall, falls, falls_too, rerun = found.tests
    assert named_fall.holds, named_fall.found
    assert falls.holds, falls.found
    assert falls_too.holds, falls_too.found
    assert rerun.holds, rerun.found
    assert len(found.rows) == 2 * 4 * 5


def test_a_difference_that_does_not_fall_is_explained_at_this_size_too(experiment, found):
    usual, wide = (
        {
            format: by_seed(found.rows, "max_abs", format=format, between=between)
            for format in ("e8m7", "e8m15", "e8m23", "fp64")
        }
        for between in experiment.BETWEEN
    )
    mean = sum(usual["e8m15"].values()) / 5
    assert f"from {mean:.2g} at e8m15 to" in experiment._explanation(usual, wide)


def test_arithmetic_between_the_points_matters_only_where_it_is_as_narrow_as_they_are(found):
    for format, matters in (("e8m7", False), ("e8m23", True), ("fp64", False)):
        narrow, wide = (
            by_seed(found.rows, "max_abs", format=format, between=between)
            for between in ("fp32", "fp64")
        )
        apart = sum(narrow.values()) / sum(wide.values())
        assert (apart > 1.5) == matters, (format, apart)


def test_figure_names_its_axes(experiment, found):
    with paper_style():
        (axes,) = experiment.draw(found.rows).axes
    assert "mantissa bits" in axes.get_xlabel()
    assert "|flash" in axes.get_ylabel()
    assert axes.get_yscale() == "log"
    assert len(axes.get_legend().get_texts()) == 2
