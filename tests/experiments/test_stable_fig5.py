"""Flash against baseline attention by length: the directions, at a size of seconds."""

import pytest

from experiments.kit.runner import load
from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(request):
    module = load(request.path.parents[2] / "experiments", "stable_fig5")
    return module.measure(module.SIZES["quick"])


def test_absolute_difference_rises_for_values_of_one_sign_only(found):
    held = {test.statement: test.holds for test in found.tests}
    assert held["U(0, 1): max rises with each length"]
    assert held["U(0, 1): mean rises with each length"]
    assert held["U(0, 1): std rises with each length"]
    assert not held["N(0, 1): mean rises with each length"]
    assert not held["N(0, 1): std rises with each length"]


def test_controls_say_why(found):
    assert all(test.holds for test in found.tests if test.control)
    assert "RMS of out falls" in found.explanation


def test_rescales_are_expected_ones(experiment):
    assert experiment._expected_rescales(1) == 0
    assert experiment._expected_rescales(3) == pytest.approx(1 / 2 + 1 / 3)


def test_figure_names_its_axes(experiment, found):
    with paper_style():
        upper, lower = experiment.draw(found.rows).axes
    assert "baseline" in upper.get_ylabel()
    assert lower.get_xlabel().startswith("keys")
    assert len(upper.get_lines()) >= 6
