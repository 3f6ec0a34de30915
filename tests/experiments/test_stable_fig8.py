"""Flash beside two inits and low precision: the order follows the formats of the pair."""

from dataclasses import replace

import pytest

from experiments.kit.study import at_step, slopes
from stability.report.paper.style import paper_style


@pytest.mark.long
def test_drift_is_ordered_by_the_formats_of_the_pair(experiment, kept_runs):
    settings = replace(experiment.SIZES["quick"], folder=kept_runs)
    found = experiment.measure(settings)
    for control in (test for test in found.tests if test.control):
        assert control.holds, f"{control.statement}: {control.found}"
    at_end = {pair: at_step(found.rows, pair, "w1", 20) for pair in experiment.PAIRS}
    for seed in range(5):
        w1 = {pair: by_seed[seed] for pair, by_seed in at_end.items()}
        ordered = sorted(w1, key=lambda pair: w1[pair])
        assert ordered[0] == experiment.FLASH32
        assert ordered[-1] == experiment.INITS
        assert w1[experiment.FP16] < w1[experiment.FLASH] < w1[experiment.BF16]
        assert w1[experiment.FLASH16] < w1[experiment.FP16]
    published = {test.statement: test for test in found.tests if not test.control}
    assert len(published) == 8
    slower = published["flash, all BF16: slope of max less that of two inits is not above 0"]
    flash, inits = (
        slopes(found.rows, pair, "max_abs") for pair in (experiment.FLASH, experiment.INITS)
    )
    apart = sum(flash[seed] - inits[seed] for seed in range(5)) / 5
    assert float(slower.found.split(" per step")[0]) == pytest.approx(apart, rel=0.01)
    assert apart < 0
    larger = published["BF16 vs FP32 over flash, all BF16: W1 at step 20 is 2 to 5 times as large"]
    ratio = 1.0
    for seed in range(5):
        ratio *= (at_end[experiment.BF16][seed] / at_end[experiment.FLASH][seed]) ** 0.2
    assert float(larger.found.split("x")[0]) == pytest.approx(ratio, rel=0.01)
    assert larger.holds == (2 < ratio < 5)
    assert f"{experiment.BF16} over {experiment.FLASH}" in found.explanation


def test_figure_has_units_and_the_published_range(experiment):
    rows = [
        {"pair": pair, "seed": seed, "step": step, "w1": (rank + 1) * step * 1e-7 + seed * 1e-9}
        for rank, pair in enumerate(experiment.PAIRS)
        for seed in range(2)
        for step in (0, 1, 10, 100)
    ]
    with paper_style():
        top, bottom = experiment.draw(rows).axes
    assert top.get_ylabel() == "W1, weight units"
    assert "updates" in bottom.get_xlabel()
    assert {top.get_yscale(), bottom.get_yscale(), bottom.get_xscale()} == {"log"}
    band = bottom.patches[0].get_extents().transformed(bottom.transData.inverted())
    assert (band.y0, band.y1) == pytest.approx((2.0, 5.0))
    names = bottom.get_legend_handles_labels()[1]
    assert "BF16 vs FP32 / flash, all FP16" in names
