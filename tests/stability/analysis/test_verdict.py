"""The verdict: what passes, what fails, what can not be told, and how often equals fail."""

import math

import numpy as np
import pytest

from stability.analysis.arm_growth import study_growth
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge, judge_study
from stability.cli.main import main
from stability.config.schema import PolicyConfig
from stability.records.sealed_json import read_sealed, write_sealed
from tests.stability.analysis.test_ladder_sentences import rewrite, scaled

POLICY = PolicyConfig(candidate="flash", yardstick="fp32", max_ratio=0.5, step=20)
FIVE = range(5)


def _around(value, spread=0.05):
    return {seed: value * (1 + spread * (seed - 2) / 2) for seed in FIVE}


def _judge(ratio, spread=0.05, rerun=None, nudge=None):
    candidate = _around(ratio, spread)
    ones = dict.fromkeys(FIVE, 1.0)
    return judge(candidate, ones, POLICY, rerun=rerun or {}, nudge=nudge or {})


@pytest.mark.parametrize(
    ("ratio", "spread", "outcome"),
    [
        (0.3, 0.05, "PASS"),
        (0.8, 0.05, "FAIL"),
        (0.49, 0.2, "INCONCLUSIVE"),
        (0.51, 0.2, "INCONCLUSIVE"),
        (0.0, 0.0, "PASS"),
        (math.nan, 0.0, "FAIL"),
    ],
)
def test_the_interval_has_to_lie_on_one_side(ratio, spread, outcome):
    assert _judge(ratio, spread).outcome == outcome


def test_a_verdict_says_ratio_interval_seeds_and_policy():
    said = _judge(0.8).sentence
    assert said.startswith("FAIL: at step 20 flash has moved the weights 0.80x (90% interval 0.7")
    assert "as far as fp32, over 5 seeds; the policy allows 0.50x" in said


def test_drifts_are_paired_by_seed():
    """Seeds differ 100-fold in both arms alike: only the ratio within a seed is steady."""
    scale = {seed: 10.0 ** (seed - 2) for seed in FIVE}
    candidate = {seed: 0.3 * scale[seed] for seed in FIVE}
    assert judge(candidate, scale, POLICY, rerun={}, nudge={}).outcome == "PASS"
    crossed = {seed: candidate[4 - seed] for seed in FIVE}
    assert judge(crossed, scale, POLICY, rerun={}, nudge={}).outcome == "INCONCLUSIVE"


def test_what_a_rerun_or_a_nudge_does_as_well_is_no_evidence():
    for name, words in (("rerun", "a rerun of the baseline"), ("nudge", "the nudge")):
        swamped = _judge(0.8, **{name: _around(0.85, 0.3)})
        assert swamped.outcome == "INCONCLUSIVE"
        assert f"can't be told from {words}" in swamped.sentence
        assert _judge(0.8, **{name: _around(0.1)}).outcome == "FAIL"


def test_too_few_seeds_for_an_interval_are_refused_unless_none_is_needed():
    candidate, ones = {0: 0.3, 1: 0.31}, {0: 1.0, 1: 1.0}
    with pytest.raises(ValueError, match=r"90% interval needs 5 seeds, got 2; .* --seeds 5"):
        judge(candidate, ones, POLICY, rerun={}, nudge={})
    same = dict.fromkeys(candidate, 0.0)
    assert judge(same, ones, POLICY, rerun={}, nudge={}).outcome == "PASS"
    lost = dict.fromkeys(candidate, math.nan)
    assert judge(lost, ones, POLICY, rerun={}, nudge={}).outcome == "FAIL"


def test_more_seeds_would_decide_as_many_as_it_says():
    dice = np.random.default_rng(0)
    few = judge(
        dict(enumerate(np.exp(dice.normal(np.log(0.47), 0.25, 5)))),
        dict.fromkeys(FIVE, 1.0),
        POLICY,
        rerun={},
        nudge={},
    )
    assert few.outcome == "INCONCLUSIVE"
    assert few.more_seeds in range(1, 1000)


def test_a_candidate_equal_to_its_baseline_rarely_fails():
    """Where reruns differ, candidate, rerun and nudge are draws of one law; the yardstick is near.

    A 90 % interval lies above 1 in 5 % of draws if it is exact; of 200 studies at most 10 and two
    standard deviations, 6, more.
    """
    dice, failed = np.random.default_rng(7), 0
    for _ in range(200):
        noise = np.exp(dice.normal(0.0, 0.3, (4, 5)))
        candidate, rerun, nudge, yardstick = (dict(enumerate(row)) for row in noise)
        found = judge(candidate, yardstick, POLICY, rerun=rerun, nudge=nudge)
        failed += found.outcome == "FAIL"
    assert failed <= 16


def test_a_candidate_twice_as_far_as_allowed_does_fail():
    """The other side of the test above: the guards against false alarms leave real ones alone."""
    dice, failed = np.random.default_rng(8), 0
    for _ in range(100):
        noise = np.exp(dice.normal(0.0, 0.1, (4, 5)))
        candidate, rerun, nudge, yardstick = (dict(enumerate(row)) for row in noise)
        rerun = {seed: 0.1 * drift for seed, drift in rerun.items()}
        nudge = {seed: 0.3 * drift for seed, drift in nudge.items()}
        found = judge(candidate, yardstick, POLICY, rerun=rerun, nudge=nudge)
        failed += found.outcome == "FAIL"
    assert failed >= 95


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart", seeds=[0, 1, 2, 3, 4])


def test_the_command_judges_a_study_by_its_own_policy(study, capsys):
    content = read_sealed(study / "study.json", "")
    content["config"]["policy"] = {"candidate": "flash_fa2", "max_ratio": 5.0}
    write_sealed(study / "study.json", content)
    assert main(["verdict", str(study)]) == 0
    assert capsys.readouterr().out.startswith("PASS: at step 20 flash_fa2 has moved the weights")
    rewrite(study, "flash_fa2", scaled(100.0))
    assert main(["verdict", str(study)]) == 1
    assert main(["verdict", str(study), "--max-ratio", "1000"]) == 0
    rewrite(study, "nudge", scaled(1e6))
    assert main(["verdict", str(study)]) == 3
    assert "can't be told from the nudge" in capsys.readouterr().out
    rewrite(study, "nudge", scaled(1e-6))
    capsys.readouterr()
    assert main(["verdict", str(study), "--json"]) == 1
    assert '"outcome": "FAIL"' in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--candidate", "flesh"],
            "candidate must be an arm of the study, got 'flesh'; nea",
        ),
        (["--candidate", "nudge", "--yardstick", "fp23"], "yardstick must be an arm .*'fp23'"),
        ([], "candidate must be named, one of "),
        (["--candidate", "nudge", "--step", "21"], "step must be one of 1, .*, got 21"),
        (["--candidate", "nudge", "--max-ratio", "-1"], "max_ratio must be > 0, got -1"),
        (["--candidate", "nudge", "--max-ratio", "0"], "max_ratio must be > 0, got 0"),
        (["--candidate", "flash_fa2", "--level", "0.99"], "99% interval needs 8 seeds, got 5; run"),
        (["--candidate", "baseline"], "candidate must be an arm of the study, got 'baseline'"),
    ],
)
def test_what_can_not_be_judged_is_one_line(study, capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        main(["verdict", str(study), *arguments])
    assert caught.value.code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    with pytest.raises(ValueError, match=message):
        raise ValueError(said)


def test_an_arm_without_drifts_yet_is_named(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    with pytest.raises(
        ValueError, match=r"flash_fa2 must have a drift .* step 20 .* none for 0, 1"
    ):
        judge_study(read_study(tmp_path), PolicyConfig(candidate="flash_fa2"))


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
