"""How a run ends: finished at the planned step alone, diverged as a result, or failed.

A loss that is no number is a result: recorded with its step, while the other arms go on.
"""

import math
from dataclasses import replace
from itertools import islice

import pytest
from lightning.pytorch import Callback

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.analysis.verdict import judge_arms
from stability.config.load import load_study
from stability.config.study import PolicyConfig
from stability.data.datamodule import BatchLoader
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles
from stability.records.witness import read_witness
from stability.study import train_run
from stability.study.assemble import make_trainer
from tests.sampling import one_in


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
    (stretch,) = read_witness(RunPaths.for_run(tmp_path / "tiny", "broken", 0).witness).all
    assert stretch.steps == [0, 1, 4], "the first two updates, and the last one"
    row = ladder_of(read_study(tmp_path / "tiny")).row("broken")
    assert row.state == "diverged"
    assert math.isnan(row.rel_l2.early.mean)
    assert "seed 0 diverged: the loss is not finite from step 0 on" in row.message
    assert [message for *_, message in run_tiny(study, tmp_path).ended] == ["kept"] * 3


@pytest.mark.slow
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


@pytest.mark.slow
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


class _StopsAtTwo(Callback):
    def on_train_batch_end(self, trainer, *args):
        trainer.should_stop = trainer.global_step == 2


def _stop_by_a_callback(monkeypatch):
    def make(config, files, loggers, callbacks, *args):
        return make_trainer(config, files, loggers, [*callbacks, _StopsAtTwo()], *args)

    monkeypatch.setattr(train_run, "make_trainer", make)


def _run_out_of_batches(monkeypatch):
    own = BatchLoader.__iter__
    monkeypatch.setattr(BatchLoader, "__iter__", lambda self: islice(own(self), 2))


def _baseline_alone(content):
    content.update(arms={"baseline": {}}, seeds=[0], yardstick="")
    content["base"]["train"].update(steps=4, snapshot_steps=[2])


@pytest.mark.parametrize("end", one_in(2, [_stop_by_a_callback, _run_out_of_batches]))
def test_a_run_that_ends_before_its_last_step_has_failed_and_goes_on_to_the_same_bits(
    write_study, run_tiny, tmp_path, end
):
    study = load_study(write_study(_baseline_alone))
    with pytest.MonkeyPatch.context() as monkeypatch:
        end(monkeypatch)
        (ended,) = run_tiny(study, tmp_path / "cut").ended
    assert ended[2:] == (
        "failed",
        "unfinished: training must end at step 4, ended at step 2 with the batches of 2 on "
        "record; a callback stopped it, or the batches ran out",
    )
    cut = RunPaths.for_run(tmp_path / "cut" / "tiny", "baseline", 0)
    assert (read_manifest(cut.manifest).state, read_manifest(cut.manifest).step) == ("failed", 2)
    assert run_tiny(study, tmp_path / "cut").ended == [("baseline", 0, "finished", "")]
    assert run_tiny(study, tmp_path / "whole").ended == [("baseline", 0, "finished", "")]
    whole = RunPaths.for_run(tmp_path / "whole" / "tiny", "baseline", 0)
    assert read_manifest(cut.manifest).hashes == read_manifest(whole.manifest).hashes


@pytest.mark.parametrize("name", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_one_of_several_processes_of_a_launcher_trains_nothing(
    write_study, run_tiny, tmp_path, monkeypatch, name
):
    study = load_study(write_study(_baseline_alone))
    monkeypatch.setenv(name, "2")
    with pytest.raises(ValueError, match=f"^{name} must be 1 where a study trains, got '2'; a run"):
        run_tiny(study, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_a_launcher_of_one_process_and_a_job_of_several_tasks_are_no_matter(
    write_study, run_tiny, tmp_path, monkeypatch
):
    # a batch script of Slurm is one process, whatever the number of tasks that its job may start
    for name, value in (("WORLD_SIZE", "1"), ("SLURM_NTASKS", "4"), ("SLURM_JOB_ID", "7")):
        monkeypatch.setenv(name, value)
    study = load_study(write_study(_baseline_alone))
    assert run_tiny(study, tmp_path).ended == [("baseline", 0, "finished", "")]


def test_a_trainer_of_several_processes_is_refused_wherever_it_comes_from(write_study, tmp_path):
    config = load_study(write_study(_baseline_alone)).base
    config.train.trainer.update(num_nodes=2, strategy="ddp")  # past the check of the config
    with pytest.raises(ValueError, match="the world size must be 1, got 2; a run trains in the pr"):
        make_trainer(config, RunFiles.unnamed(tmp_path), [], [])
