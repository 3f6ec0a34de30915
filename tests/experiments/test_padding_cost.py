"""Cost is measured for each implementation at each length; memory, which is exact, is checked."""

import pytest

from experiments.kit.rows import chosen
from stability.report.paper.style import paper_style


def mib(rows, implementation, padding, length=128):
    at = {"implementation": implementation, "padding": padding, "length": length}
    return max(row["mib"] for row in chosen(rows, **at))


@pytest.mark.slow
def test_the_mask_is_what_memory_goes_to(experiment):
    found = experiment.measure(experiment.SIZES["quick"])
    rows = found.rows
    # 5 batches, 2 lengths, sdpa and un-padded at 3 paddings, eager at one
    assert len(rows) == 5 * 2 * 7
    assert all(row["seconds"] > 0 for row in rows)
    assert mib(rows, "un-padded", "none") == mib(rows, "sdpa", "none")
    assert (
        mib(rows, "un-padded", "padded")
        < mib(rows, "sdpa", "padded")
        < mib(rows, "eager", "padded")
    )
    memory = [test for test in found.tests if "less memory" in test.statement]
    controls = [test for test in found.tests if test.control]
    assert not any(test.holds for test in memory)
    assert len(memory) == 2
    assert controls[1].holds
    assert controls[2].holds
    with paper_style():
        time, peak = experiment.draw(rows).axes
    assert (time.get_ylabel(), peak.get_ylabel()) == ("time / SDPA's", "peak memory / SDPA's")
    assert peak.get_xlabel() == "length (tokens)"
