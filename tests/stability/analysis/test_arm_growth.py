"""Growth: one rate of the dynamics, from the nudges, and only where they do grow exponentially."""

import math
from dataclasses import replace

import numpy as np
import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.growth_fit import fit_growth
from stability.analysis.study_records import read_study
from stability.records.metric_columns import Series
from stability.records.metric_names import drift_name
from tests.stability.analysis.test_ladder_sentences import rewrite, scaled

LOG_SPACED = (1, 2, 5, 10, 20, 50, 100, 150)
EARLY = (1, 2, 5, 10, 15, 20, 30, 40)
EVEN = tuple(range(5, 151, 5))
EXPONENTIAL = {
    "pure": lambda t: 1e-7 * np.exp(0.05 * t),
    "saturating": lambda t: 1 / (1 / (1e-7 * np.exp(0.1 * t)) + 1e4),
}
OTHER = {
    "line": lambda t: 1e-7 * t,
    "root": lambda t: 1e-7 * t**0.5,
    "square": lambda t: 1e-7 * t**2,
    "saturating line": lambda t: 1e-7 / (1 / t + 1 / 40),
}
SCHEDULES = pytest.mark.parametrize(
    "steps", [LOG_SPACED, EARLY, EVEN], ids=["log-spaced", "early", "even"]
)


@pytest.fixture(scope="module")
def recorded(synthetic, tmp_path_factory):
    folder = tmp_path_factory.mktemp("growth") / "quickstart"
    return read_study(synthetic.write_synthetic(folder, seeds=[0, 1, 2, 3, 4]))


def with_drifts(study, arm, curve, steps, sigma=0.05):
    """Return the study with the drifts of an arm by `curve`, with noise of its own in each seed."""
    runs = {}
    for seed, run in study.arm(arm).runs.items():
        dice = np.random.default_rng([seed, len(arm)])
        drifts = curve(np.array(steps, float)) * np.exp(sigma * dice.normal(size=len(steps)))
        series = Series(steps=list(steps), values=drifts.tolist())
        runs[seed] = replace(run, metrics={drift_name("all", "rel_l2"): series})
    changed = replace(study.arm(arm), runs=runs)
    return replace(study, arms=tuple(changed if x.name == arm else x for x in study.arms))


def _rows(study):
    return {row.arm: row for row in study_growth(study)}


@SCHEDULES
@pytest.mark.parametrize("law", OTHER)
def test_a_power_law_has_no_doubling_time(recorded, law, steps):
    """A straight line used to double in 2 to 76 steps, by the schedule of its snapshots."""
    study = with_drifts(recorded, "nudge", OTHER[law], steps)
    dynamics = _rows(study)["flash_fa2"].dynamics
    assert not dynamics.is_exponential
    assert "a power law of the step fits the nudges as well" in dynamics.reason
    assert math.isnan(dynamics.doubling_time)


@pytest.mark.parametrize("law", EXPONENTIAL)
@pytest.mark.parametrize("steps", [LOG_SPACED, EVEN], ids=["log-spaced", "even"])
def test_an_exponential_has_its_rate_whatever_the_schedule(recorded, law, steps):
    study = with_drifts(recorded, "nudge", EXPONENTIAL[law], steps)
    dynamics = _rows(study)["flash_fa2"].dynamics
    rate = {"pure": 0.05, "saturating": 0.1}[law]
    assert dynamics.is_exponential
    assert dynamics.seeds == dynamics.rate.n == 5
    # 15 % is three times the noise of five rates over the first 20 steps
    assert dynamics.rate.mean == pytest.approx(rate, rel=0.15)
    assert dynamics.doubling_time == pytest.approx(math.log(2) / dynamics.rate.mean)
    assert dynamics.rate.low < dynamics.rate.mean < dynamics.rate.high


def test_power_laws_are_hardly_ever_called_exponential():
    """Of 40 studies of three seeds with noise of 20 %, which hides most of the law."""
    dice, found = np.random.default_rng(0), []
    for _ in range(40):
        curve = OTHER["line"](np.array(EARLY, float))
        fits = [fit_growth(EARLY, curve * np.exp(0.2 * dice.normal(size=8))) for _ in range(3)]
        better = np.array([fit.exponential_over_power for fit in fits])
        found.append(better.mean() > 2.92 * better.std(ddof=1) / math.sqrt(3))
    assert sum(found) <= 4


def test_an_arm_has_an_offset_and_no_rate_of_its_own(recorded):
    """A drift that starts ten times as far and grows as fast stays ten times as far."""
    growing = EXPONENTIAL["pure"]
    study = with_drifts(recorded, "nudge", growing, LOG_SPACED)
    study = with_drifts(study, "flash_fa2", lambda t: 10 * growing(t), LOG_SPACED)
    rows = _rows(study)
    assert rows["flash_fa2"].offset.mean == pytest.approx(10, rel=0.1)
    assert rows["flash_fa2"].offset.low < 10 < rows["flash_fa2"].offset.high
    assert math.isnan(rows["nudge"].offset.mean)
    assert math.isnan(rows["rerun"].offset.mean)
    assert rows["flash_fa2"].dynamics == rows["nudge"].dynamics


def test_what_keeps_a_rate_from_being_stated_is_told(recorded):
    few = tuple(replace(arm, runs={s: arm.runs[s] for s in (0, 1)}) for arm in recorded.arms)
    reason = _rows(replace(recorded, arms=few))["nudge"].dynamics.reason
    assert reason == "2 of the 3 seeds that it takes have a growing nudge"
    falling = with_drifts(recorded, "nudge", lambda t: 1e-3 * np.exp(-0.05 * t), LOG_SPACED)
    assert _rows(falling)["nudge"].dynamics.reason == "the nudges do not grow"
    without = tuple(arm for arm in recorded.arms if arm.name != "nudge")
    row = study_growth(replace(recorded, arms=without))[0]
    assert row.dynamics.reason == "there is no nudge"
    assert row.slope.n == 5
    assert math.isnan(row.offset.mean)


def test_chaos_begins_where_the_nudge_catches_up(synthetic, tmp_path):
    study = synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2, 3, 4])
    rewrite(study, "flash_fa2", scaled(50.0, steps=(1, 20)))
    rewrite(study, "flash_fa2", scaled(1e-3, steps=(100, 200)))
    rows = _rows(read_study(study))
    assert rows["flash_fa2"].lost_in_chaos == 100
    assert rows["nudge"].lost_in_chaos is None
