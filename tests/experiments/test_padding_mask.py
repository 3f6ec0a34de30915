"""Where implementations differ on padded batches, and that zeros are the reason."""

import pytest

from experiments.kit.rows import by_seed
from stability.report.paper.style import paper_style


@pytest.mark.slow
def test_they_differ_in_padded_rows_alone(experiment):
    found = experiment.measure(experiment.SIZES["quick"])
    published = [test for test in found.tests if not test.control]
    # on the left a padded row sees no key: today's SDPA has zeros there too
    assert [test.holds for test in published] == [True, True, False, True, True, True]
    for test in found.tests:
        assert test.holds or not test.control, f"{test.statement}: {test.found}"
    assert "opened" in found.explanation
    check_pair(found.rows, "sdpa, un-padded fa2")
    check_pair(found.rows, "sdpa, un-padded torch")
    with paper_style():
        (axes,) = experiment.draw(found.rows).axes
    assert axes.get_xlabel().startswith("rtol = atol needed")
    assert axes.get_yticklabels()[0].get_text() == "no padding"


def check_pair(rows, pair):
    right = {"format": "bf16", "side": "right", "pair": pair}
    for seed, padded in by_seed(rows, "padded", **right).items():
        assert padded > 20 * by_seed(rows, "valid", **right)[seed]
        assert padded > 20 * by_seed(rows, "zeroed", **right)[seed]
    exact = {**right, "format": "fp32"}
    assert max(by_seed(rows, "valid", **exact).values()) < 1e-5
    assert min(by_seed(rows, "padded", **exact).values()) > 0.1
