"""How a study is summed up in the list of all: progress, answers, a small ladder."""

from dataclasses import replace

import pytest

from stability.analysis.ladder import ladder_of
from stability.analysis.number_text import scientific
from stability.analysis.study_records import read_study
from stability.records.paths import StudyPaths
from stability.records.run_lock import hold
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.live.study_summary import (
    answers,
    outline_of_study,
    small_ladder,
    summary_of_study,
)
from stability.report.view.palette import arm_styles


@pytest.fixture
def study(finished):
    return read_study(finished)


def test_summary_says_how_a_study_that_runs_goes(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    for arm in synthetic.ARMS[:3]:
        synthetic.write_run(tmp_path, arm, 0)
    trained = synthetic.write_run(tmp_path, synthetic.ARMS[3], 0, state="running", until=80)
    synthetic.write_run(tmp_path, synthetic.ARMS[4], 0, state="failed", until=40)
    with hold(trained):
        found = summary_of_study(read_study(tmp_path))
    assert found.state == (
        "1 running, 1 failed, 3 finished, 9 to come of 14 runs; now rerun, seed 0, at step 80"
    )
    assert found.is_running
    assert found.next == ""
    assert found.is_bad
    assert found.done == pytest.approx((3 * 200 + 80 + 40) / (14 * 200))
    synthetic.write_study_json(tmp_path / "new")
    assert summary_of_study(read_study(tmp_path / "new")).done == 0


def test_run_whose_process_is_gone_is_stopped(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path, seeds=[0])
    run = synthetic.write_run(tmp_path, synthetic.ARMS[0], 0, state="running", until=80)
    with hold(run):
        first = read_study(tmp_path)
        assert summary_of_study(first).state.startswith("1 running, 6 to come of 7 runs; now")
    for study in (read_study(tmp_path), read_study(tmp_path, known=first)):
        found = summary_of_study(study)
        assert found.state == "1 stopped, 6 to come of 7 runs"
        assert found.next == "the same command again goes on from here"
        assert found.is_bad
        assert not found.is_running
        assert found.done == pytest.approx(80 / (7 * 200))
        row = ladder_of(study).row("baseline")
        assert (row.state, row.message) == (
            "stopped",
            "seed 0 stopped: no process trains it any more; the same command goes on from its "
            "last checkpoint",
        )


def test_what_failed_is_to_be_read_on_the_page_and_tried_again(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    synthetic.write_run(tmp_path, synthetic.ARMS[0], 0, state="failed", until=40)
    found = summary_of_study(read_study(tmp_path))
    assert found.state == "1 failed, 13 to come of 14 runs"
    assert found.next == (
        "its page has each run's error; the same command again tries those runs anew"
    )


def test_a_study_without_a_drift_has_no_ladder_of_dashes(synthetic, tmp_path):
    synthetic.write_study_json(tmp_path)
    found = summary_of_study(read_study(tmp_path))
    assert found.ladder is not None
    assert found.ladder.rungs == ()


def test_a_finished_study_asks_for_nothing(study):
    assert summary_of_study(study).next == ""


def test_outline_needs_no_log_and_agrees_with_the_summary(synthetic, tmp_path):
    synthetic.write_synthetic(tmp_path, seeds=[0])
    whole = summary_of_study(read_study(tmp_path))
    assert not whole.is_outline
    for log in tmp_path.glob("*/*/metrics.jsonl"):
        log.unlink()
    read = read_study(tmp_path, has_logs=False)
    assert outline_of_study(read) == replace(whole, answers=(), ladder=None, is_outline=True)
    assert summary_of_study(read_study(tmp_path)) != whole, "the log is missed where it is needed"


def test_study_without_its_logs_is_no_start_for_one_with_them(study, finished):
    known = read_study(finished, has_logs=False)
    assert not any(run.metrics for arm in known.arms for run in arm.runs.values())
    assert read_study(finished, known=known) == study


def test_runs_that_the_study_no_longer_lists_are_named(synthetic, tmp_path):
    synthetic.write_synthetic(tmp_path)
    whole = read_study(tmp_path)
    assert not whole.unlisted
    assert not summary_of_study(whole).unlisted
    (tmp_path / "no-run" / "seed-0").mkdir(parents=True)
    content = read_sealed(StudyPaths(tmp_path).study, "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "flash_all_bf16"]
    content["config"]["seeds"] = [0]
    write_sealed(StudyPaths(tmp_path).study, content)
    found = summary_of_study(read_study(tmp_path))
    assert found.unlisted.startswith("On disk, but not in the study: baseline (seed 1); ")
    assert "; flash_all_bf16 (seeds 0, 1); " in found.unlisted
    assert "no-run" not in found.unlisted
    assert "flash_fa2" in {rung.arm for rung in found.ladder.rungs}
    assert "flash_all_bf16" not in {rung.arm for rung in found.ladder.rungs}


def test_answer_is_the_verdict_once_there_is_a_look(study, synthetic, tmp_path):
    ladder = ladder_of(study)
    assert [said.split()[0] for said in answers(study, ladder)] == ["flash_fa2", "flash_all_bf16"]
    three = read_study(synthetic.write_synthetic(tmp_path / "three", seeds=[0, 1, 2]))
    assert [said.split(":")[0] for said in answers(three, ladder_of(three))] == [
        "flash_all_bf16 INCONCLUSIVE",
        "flash_fa2 INCONCLUSIVE",
    ]
    controls = replace(study, arms=tuple(a for a in study.arms if a.axis != "attention"))
    assert "names an attention" in answers(controls, ladder_of(controls))[0]


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
