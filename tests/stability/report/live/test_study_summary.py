"""How a study is summed up in the list of all: progress, answers, a small ladder."""

from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import scientific
from stability.analysis.study_records import read_study
from stability.report.live.study_summary import answers, small_ladder, summary_of_study
from stability.report.view.palette import arm_styles


@pytest.fixture
def study(finished):
    return read_study(finished)


def test_summary_says_how_a_study_that_runs_goes(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS[:3]:
        synthetic.write_run(tmp_path, arm, 0)
    synthetic.write_run(tmp_path, synthetic.ARMS[3], 0, state="running", until=80)
    synthetic.write_run(tmp_path, synthetic.ARMS[4], 0, state="failed", until=40)
    found = summary_of_study(read_study(tmp_path))
    assert found.state == (
        "1 running, 1 failed, 3 finished, 9 missing of 14 runs; now rerun, seed 0, at step 80"
    )
    assert found.is_running
    assert found.is_bad
    assert found.done == pytest.approx((3 * 200 + 80 + 40) / (14 * 200))
    synthetic.write_study_json(tmp_path / "new")
    assert summary_of_study(read_study(tmp_path / "new")).done == 0


def test_answer_is_the_verdict_once_there_is_a_look(study, synthetic, tmp_path):
    ladder = ladder_of(study)
    assert [said.split()[0] for said in answers(study, ladder)] == ["flash_fa2", "flash_all_bf16"]
    three = read_study(synthetic.write_synthetic(tmp_path / "three", seeds=[0, 1, 2]))
    assert [said.split(":")[0] for said in answers(three, ladder_of(three))] == [
        "flash_all_bf16 INCONCLUSIVE",
        "flash_fa2 INCONCLUSIVE",
    ]
    controls = replace(study, arms=tuple(a for a in study.arms if a.axis != "attention"))
    assert "its controls" in answers(controls, ladder_of(controls))[0]


def test_answer_opens_with_a_change_of_the_protocol_before_and_after_the_first_look(
    study, synthetic, tmp_path
):
    three = read_study(synthetic.write_synthetic(tmp_path / "three", seeds=[0, 1, 2]))
    for sealed in (study, three):
        loose = replace(sealed, policy=replace(sealed.policy, margin_nats=0.5))
        plain, (first, *rest) = (answers(one, ladder_of(one)) for one in (sealed, loose))
        assert first == (
            "EXPLORATORY, so nothing is proven: policy.margin_nats is 0.5, was sealed as 0.005."
        )
        assert [said.split()[0] for said in rest] == [said.split()[0] for said in plain]


def test_answer_shows_a_failure_before_the_first_look(study):
    arms = []
    for arm in study.arms:
        if arm.name == "flash_fa2":
            run = arm.runs[0]
            lost = replace(run.manifest, state="diverged", message="the loss is NaN")
            arm = replace(arm, runs={**arm.runs, 0: replace(run, manifest=lost)})
        arms.append(arm)
    lost = replace(study, arms=tuple(arms))
    assert (
        "flash_fa2 FAIL: it is lost where the baseline is sound, seed 0: the loss is NaN."
        in answers(lost, ladder_of(lost))
    )


def test_small_ladder_places_arms_by_the_logarithm_of_their_ratio(study):
    ladder = ladder_of(study)
    small = small_ladder(ladder, arm_styles([arm.name for arm in study.arms]))
    rungs = {rung.arm: rung for rung in small.rungs}
    assert list(rungs) == [row.arm for row in ladder.rows if row.arm != "baseline"]
    assert rungs["rerun"].text == "0 (exact)"
    assert rungs["rerun"].early is None
    assert rungs["init_seed"].early is None, "decades away: named only"
    assert rungs["init_seed"].text == "244x"
    assert rungs["fp32"].early.mean == small.yardstick_at
    marks = [rungs[arm].early for arm in ("nudge", "flash_fa2", "flash_all_bf16")]
    assert marks[0].mean < marks[1].mean < small.yardstick_at < marks[2].mean
    assert all(0 <= mark.low <= mark.mean <= mark.high <= 100 for mark in marks)
    without = ladder_of(replace(study, yardstick=""))
    small = small_ladder(without, arm_styles([arm.name for arm in study.arms]))
    assert small.yardstick_at is None
    assert small.measure.startswith("drift (relative L2)")
    assert [rung.text for rung in small.rungs if rung.arm == "fp32"] == [
        scientific(ladder.row("fp32").rel_l2.early.mean)
    ]
