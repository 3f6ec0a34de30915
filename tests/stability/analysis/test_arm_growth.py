"""Growth of each arm: rate, doubling time, and the step from which chaos has caught up."""

import math

import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.study_records import read_study
from tests.stability.analysis.test_ladder_sentences import rewrite, scaled


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2, 3, 4])


def test_growth_is_told_for_each_arm_with_its_interval(study):
    rows = {row.arm: row for row in study_growth(read_study(study))}
    grown = rows["flash_fa2"]
    assert grown.rate.n == 5
    assert grown.rate.low <= grown.rate.mean <= grown.rate.high
    assert grown.doubling_time == pytest.approx(math.log(2) / grown.rate.mean)
    assert math.isnan(rows["rerun"].rate.mean)
    assert rows["nudge"].lost_in_chaos is None


def test_chaos_begins_where_the_nudge_catches_up(study):
    rewrite(study, "flash_fa2", scaled(50.0, steps=(1, 20)))
    rewrite(study, "flash_fa2", scaled(1e-3, steps=(100, 200)))
    rows = {row.arm: row for row in study_growth(read_study(study))}
    assert rows["flash_fa2"].lost_in_chaos == 100
