"""Runs in processes of their own end in the bits of runs one after another; a dead one is told."""

import pytest

from stability.config.load import load_study
from tests.stability.study.recorded_bits import recorded_bits


def _three(content):
    content["arms"] = {"baseline": {}, "fp32": {"precision": "32-true"}, "rerun": {}}
    content["seeds"] = [0]


@pytest.mark.slow
def test_two_at_once_end_in_the_same_bits(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_three))
    together = run_tiny(study, tmp_path / "together", jobs=2)
    assert sorted(ended[:3] for ended in together.ended) == [
        (arm, 0, "finished") for arm in ("baseline", "fp32", "rerun")
    ]
    assert together.ended[0][0] == "baseline"
    assert len(together.losses) == 3 * 6
    run_tiny(study, tmp_path / "alone")
    alone = recorded_bits(tmp_path / "alone" / "tiny")
    assert recorded_bits(tmp_path / "together" / "tiny") == alone
    again = run_tiny(study, tmp_path / "together", jobs=2).ended
    assert [message for *_, message in again] == ["kept"] * 3


@pytest.mark.slow
def test_a_killed_child_is_a_failed_run_and_the_others_go_on(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["arms"]["deadly"] = {"attention": own}

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ("deadly", 0, "failed", "killed by signal 9") in ended
    assert sorted(arm for arm, _, state, _ in ended if state == "finished") == [
        "baseline",
        "fp32",
        "rerun",
    ]


@pytest.mark.slow
def test_candidates_of_a_failed_baseline_are_skipped(write_study, run_tiny, tmp_path):
    def edit(content):
        _three(content)
        own = {"implementation": "tests.stability.study.own_attentions:deadly"}
        content["base"]["attention"] = own

    ended = run_tiny(load_study(write_study(edit)), tmp_path, jobs=2).ended
    assert ended[0] == ("baseline", 0, "failed", "killed by signal 9")
    assert {ended[2:] for ended in ended[1:]} == {("skipped", "its baseline did not finish")}


def test_no_jobs_are_refused(write_study, run_tiny, tmp_path):
    with pytest.raises(ValueError, match="jobs must be >= 1, got 0"):
        run_tiny(load_study(write_study(_three)), tmp_path, jobs=0)
    assert not list(tmp_path.glob("tiny/*"))
