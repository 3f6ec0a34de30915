"""A loss that is no number is a result: recorded with its step, while the other arms go on."""

import math
from dataclasses import replace

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.load import load_study
from stability.config.schema import PolicyConfig
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths


def _with_broken_arm(content):
    own = {"implementation": "tests.stability.study.own_attentions:not_a_number"}
    content["arms"] = {
        "baseline": {},
        "broken": {"attention": own},
        "fp32": content["arms"]["fp32"],
    }
    content["seeds"] = [0]
    content["base"]["train"]["steps"] = 12


def test_an_arm_that_diverges_is_a_result_and_the_others_go_on(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_with_broken_arm))
    ended = run_tiny(study, tmp_path).ended
    assert [(arm, state) for arm, _, state, _ in ended] == [
        ("baseline", "finished"),
        ("broken", "diverged"),
        ("fp32", "finished"),
    ]
    manifest = read_manifest(RunPaths.for_run(tmp_path / "tiny", "broken", 0).manifest)
    assert (manifest.state, manifest.step) == ("diverged", 5)
    assert manifest.message == "the loss is not finite from step 0 on"
    row = ladder_of(read_study(tmp_path / "tiny")).row("broken")
    assert row.state == "diverged"
    assert math.isnan(row.rel_l2.early.mean)
    assert "seed 0 diverged: the loss is not finite from step 0 on" in row.message
    assert [message for *_, message in run_tiny(study, tmp_path).ended] == ["kept"] * 3


def test_a_divergence_at_a_checkpoint_survives_a_kill(write_study, run_tiny, tmp_path):
    def edit(content):
        _with_broken_arm(content)
        content["base"]["train"]["checkpoint_every"] = 5

    study = load_study(write_study(edit))
    run_tiny(study, tmp_path)
    run = RunPaths.for_run(tmp_path / "tiny", "broken", 0)
    before, bits = read_manifest(run.manifest), run.metrics.read_bytes()
    files = {name: sum for name, sum in before.files.items() if name != "metrics.jsonl"}
    write_manifest(run.manifest, replace(before, state="running", message="", files=files))
    assert run_tiny(study, tmp_path).ended[1][2] == "diverged"
    after = read_manifest(run.manifest)
    assert (after.step, after.message, after.hashes) == (before.step, before.message, before.hashes)
    assert run.metrics.read_bytes() == bits


def test_arms_are_compared_up_to_where_their_baseline_diverged(write_study, run_tiny, tmp_path):
    def edit(content):
        _with_broken_arm(content)
        content["arms"]["broken"] = {"attention": {"implementation": "flash", "profile": "fa2"}}
        content["base"]["optimizer"] = {"lr": 1e19, "warmup_steps": 0}

    study = load_study(write_study(edit))
    ended = run_tiny(study, tmp_path).ended
    assert {state for _, _, state, _ in ended} == {"diverged"}, ended
    (found,) = judge_arms(read_study(tmp_path / "tiny"), PolicyConfig()).candidates[:1]
    assert (found.arm, found.outcome) == ("broken", "INCONCLUSIVE")
    assert "the baseline is lost, seed 0: the loss is not finite" in found.sentence
    drifts = read_metrics(RunPaths.for_run(tmp_path / "tiny", "fp32", 0).metrics)
    assert drifts["drift/all/rel_l2"].steps[:2] == [0, 1]
