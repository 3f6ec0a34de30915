"""Faults planted on a trained candidate: measured on its own weights, found, and made once."""

from dataclasses import replace

import pytest

from stability.analysis.assay import arm_assay
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.load import load_study
from stability.config.schema import PolicyConfig
from stability.records.assay import read_assay
from stability.study import assay
from stability.study.run_study import plan_study


@pytest.fixture
def trained_study(write_study, run_tiny, tmp_path, monkeypatch):
    """A tiny study with a candidate and an arm that is broken on purpose, run with its assay."""
    # the share of a bias takes 24 looks, which is the demo's business
    monkeypatch.setattr(assay, "SHARE_LOOKS", 3)

    def edit(content):
        fa2 = {"implementation": "flash", "profile": "fa2"}
        content["arms"] = {
            "baseline": {},
            "fa2": {"attention": fa2},
            "broken": {"attention": {**fa2, "fault": "out_gain_1pct"}},
        }
        content["seeds"], content["yardstick"] = [0], ""

    study = load_study(write_study(edit))
    run_tiny(study, tmp_path)
    return study, tmp_path / study.name


def test_a_studys_candidates_are_assayed_at_its_end(trained_study, tmp_path, monkeypatch):
    study, folder = trained_study
    assert read_assay(folder, "broken") is None, "it is a fault itself"
    record = read_assay(folder, "fa2")
    steps = list(record.parents)
    assert steps == [f"snapshots/step-{step:08d}.safetensors" for step in (2, 4, 6)]
    by_name = {fault.name: fault for fault in record.faults}
    assert len(by_name) == 11
    gains = by_name["dk_gain"].operator
    assert sum(gains["dk"]["gain"]) / 6 == pytest.approx(5e-3, rel=0.3)
    assert gains["dq"] == record.own.operator["dq"], "a factor on dk leaves dq alone"
    assert min(by_name["dropped_key"].ratios) > 2
    assert not by_name["scale_gain"].ratios, "only the operator shows it"
    found = arm_assay(read_study(folder), read_study(folder).arm("fa2"), PolicyConfig())
    operator = [text for text in found.missed if text.endswith("operator")]
    assert operator == []

    monkeypatch.setattr(assay, "assay_run", lambda *_: pytest.fail("measured again"))
    runs = plan_study(study, tmp_path)
    assert assay.update_assays(folder, runs, study.policy, lambda *_: None) == []


def test_an_arm_that_fails_already_is_not_assayed(trained_study, tmp_path, monkeypatch):
    study, folder = trained_study
    path = folder / "assay" / "fa2.json"
    path.unlink()
    runs = plan_study(study, tmp_path)

    def failing(recorded, policy):
        judged = judge_arms(recorded, policy)
        arms = tuple(replace(arm, outcome="FAIL") for arm in judged.arms)
        return replace(judged, arms=arms)

    with monkeypatch.context() as patch:
        patch.setattr(assay, "judge_arms", failing)
        assert assay.update_assays(folder, runs, study.policy, lambda *_: None) == []
    assert not path.exists()
    (made,) = assay.update_assays(folder, runs, study.policy, lambda *_: None)
    assert made.arm == "fa2", "it is undecided after one seed"
