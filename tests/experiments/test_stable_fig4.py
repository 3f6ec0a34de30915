"""Flash and baseline against FP64, by rounding points: the sides, at a size of seconds."""

import pytest

from experiments.kit.rows import by_seed
from stability.report.paper.style import paper_style


@pytest.fixture(scope="module")
def found(experiment):
    return experiment.measure(experiment.SIZES["quick"])


@pytest.mark.slow
def test_the_number_of_key_blocks_makes_the_ten(found):
    held = [test.holds for test in found.tests if not test.control]
    assert held == [False, False, True], "64 blocks are too few, 256 are enough"
    assert all(test.holds for test in found.tests if test.control)
    assert "names a number of blocks" in found.explanation


@pytest.mark.slow
def test_which_side_of_baseline_depends_on_the_rounding_points(found):
    profiles = [row for row in found.rows if row["part"] == "profiles"]
    ratio = {who: by_seed(profiles, "rel_ratio", who=who) for who in ("all_bf16", "fa2")}
    assert min(ratio["all_bf16"].values()) > 2
    assert max(ratio["fa2"].values()) < 0.7
    assert set(by_seed(profiles, "rel_ratio", who="baseline").values()) == {1.0}


def test_names_of_the_table_are_their_numerics(experiment):
    raised = experiment.flash_numerics("FP32 statistics, accumulator", 64)
    assert (raised.forward.statistics, raised.forward.accumulator) == ("fp32", "fp32")
    assert (raised.forward.scores, raised.tiling.block_k) == ("bf16", 64)
    assert experiment.flash_numerics("all_bf16, key_outer", 16).tiling.loop_order == "key_outer"


@pytest.mark.slow
def test_figure_names_its_axes(experiment, found):
    with paper_style():
        upper, lower = experiment.draw(found.rows).axes
    assert len(upper.get_yticklabels()) == len(experiment.TABLE)
    assert upper.get_xlabel() == "error / baseline's"
    assert lower.get_xlabel().startswith("key blocks")
