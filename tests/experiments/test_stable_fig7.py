"""Weights of flash against baseline through training: W1 grows, and so does a nudge's."""

from dataclasses import replace

import pytest

from experiments.kit.study import at_step
from stability.report.paper.style import paper_style


@pytest.mark.long
def test_weights_part_and_so_do_those_of_a_nudge(experiment, kept_runs):
    settings = replace(experiment.SIZES["quick"], folder=kept_runs)
    found = experiment.measure(settings)
    published = {test.statement: test for test in found.tests if not test.control}
    assert len(published) == 4
    for name in experiment.FLASH:
        grows = published[f"{name}: W1 grows from each snapshot to the next"]
        assert grows.holds, grows.found
        assert set(at_step(found.rows, name, "max_abs", 0).values()) == {0.0}
    for control in (test for test in found.tests if test.control):
        assert control.holds, f"{control.statement}: {control.found}"
    assert len(found.rows) == 4 * 5 * 6
    nudge, harsh, fa2 = (
        at_step(found.rows, name, "w1", 20)
        for name in ("1-ULP nudge", "flash, all BF16", "flash, fa2")
    )
    assert all(0 < nudge[seed] < fa2[seed] < harsh[seed] for seed in range(5))
    with paper_style():
        panels = experiment.draw(found.rows).axes
    assert [axes.get_ylabel() for axes in panels] == [
        "W1 difference, weight units",
        "max difference, weight units",
    ]
    assert panels[1].get_xlabel().startswith("updates made")
    assert {axes.get_yscale() for axes in panels} == {"log"}
