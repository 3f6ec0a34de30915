"""The estimate of a study: its disk is what a study really leaves, and nothing of it stays."""

import json
import os
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from stability.cli.main import main
from stability.config.load import load_study
from stability.config.model import ModelConfig
from stability.config.schema import ArmConfig, ProbeConfig, TrainConfig
from stability.model.ranks import ALONE
from stability.probe.schedule import Schedule
from stability.study import arm_trial, cost_estimate, run_study
from stability.study.arm_trial import Trial
from stability.study.call_over_ranks import call_over_ranks
from stability.study.cost_estimate import StudyCost, _kept_beside, cost_of
from stability.study.measuring_cost import USUAL, MeasuringCost
from stability.study.memory_estimate import Estimate, Part, estimate_memory
from stability.study.run_study import plan_study
from tests.pages import ROOT


def small(content):
    arms = content["arms"]
    content["arms"] = {name: arms[name] for name in ("baseline", "fp32")}
    content["arms"]["short"] = {"nudge": {"ulps": 1}, "until": 4, "probe": {"every": 0}}
    content["seeds"] = [0]
    # so large that weights, and not the text of records, fill the disk
    content["base"]["model"] |= {"width": 128, "depth": 4}
    content["base"]["train"]["snapshot_steps"] = [2, 4]


def left(*folders):
    """Return the bytes of all files below folders, of hard links once."""
    found = {}
    for folder in folders:
        stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
        found |= {each.st_ino: each.st_size for each in stats}
    return sum(found.values())


@pytest.mark.slow
def test_the_disk_is_within_a_fifth_of_what_a_study_leaves(write_study, tmp_path, run_tiny):
    study = load_study(write_study(small))
    runs = plan_study(study, tmp_path / "runs")
    cost = cost_of(runs, "none", isolated=False)
    assert not (tmp_path / "runs").exists()
    for keep, disk in (("all", cost.disk_of_all), ("none", cost.disk)):
        # the second time nothing is left to train, and snapshots are dropped
        run_tiny(replace(study, keep=keep), tmp_path / "runs")
        # the command writes the report, and not the study
        own = sum(disk.values()) - disk["report"]
        assert abs(own / left(tmp_path / "runs") - 1) < 0.2, keep
        for kind in ("snapshots", "sketches", "checkpoints"):
            exact = left(*(tmp_path / "runs").rglob(kind))
            assert abs(disk[kind] - exact) <= 0.05 * exact, (keep, kind)
    assert cost.runs == 3
    assert 0.01 < cost.seconds < 1000
    assert cost.bytes < 0.5 * cost.bytes_of_all


@pytest.mark.slow
def test_the_command_says_it_in_lines_and_in_json(write_study, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = write_study(
        lambda content: content.update(seeds=[0], arms={"baseline": {}}, yardstick="")
    )
    before = sorted(tmp_path.iterdir())
    assert main(["estimate", str(path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[2].startswith(
        "timing 1 of 1: baseline, seed 0: up to 7 updates, some with the probe"
    )
    said = printed.out.splitlines()
    assert all(len(line) <= 80 for line in said)
    assert [line.split()[0] for line in said if line[0] != " "] == [
        "tiny:",
        "time",
        "disk",
        "memory",
    ]
    assert main(["estimate", str(path), "--json", "--train.steps", "4"]) == 0
    cost = json.loads(capsys.readouterr().out)
    (run,) = plan_study(load_study(path, {"train.steps": "4"}), tmp_path)
    assert cost["memory_bytes"] == estimate_memory(run.config, 4).bytes
    assert cost["disk_bytes"] == sum(cost["disk"].values())
    assert cost["disk_bytes_with_keep_all"] == cost["disk_bytes"]
    assert cost["hours"] > 0
    assert sorted(tmp_path.iterdir()) == before


def _cost(seconds, **changes):
    """Return the cost of a study of three arms that takes `seconds`, half of them for looks."""
    by_arm = {"baseline": 0.2 * seconds, "mine": 0.5 * seconds, "broken": 0.3 * seconds}
    known = StudyCost(
        runs=9,
        seconds_by_arm=by_arm,
        look_seconds=seconds / 2,
        measuring=MeasuringCost(report=0.0),
        keep="none",
        disk={"records": 10},
        disk_of_all={"records": 10},
        memory=Estimate((Part("weights", 10),)),
        on_gpu=False,
    )
    return replace(known, **changes)


@pytest.mark.parametrize("load", [0.0, 100.0])
def test_of_a_study_that_takes_long_it_says_what_shortens_it_and_what_that_costs(
    write_study, capsys, monkeypatch, load
):
    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: _cost(1100.0))
    monkeypatch.setattr(run_study, "plan_study", lambda *_: [])
    monkeypatch.setattr(run_study, "may_pass", lambda *_: False)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    path = write_study(lambda content: content.update(seeds=[0, 1, 2, 3]))
    assert main(["estimate", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert "time 18.3 minutes here" in said
    assert ("at a load of 100.0 on" in said) == (load > 0)
    for lever in (
        "mine 9.2 minutes, broken 5.5 minutes, baseline 3.7 minutes. Where training is judged, "
        "a PASS needs a reference, a nudge and a broken arm, each in 3 seeds",
        "looks, 9.2 minutes in all (probe: every, gradient_every). Operator and gradient get less",
        "judged from 20 looks on",
        "now (train.steps). Less of the training is seen",
        "- seeds, 4 now. Intervals get wider; fewer than 3 are not judged",
    ):
        assert lever in said


def test_a_long_name_of_what_takes_memory_goes_on_in_the_next_line(
    write_study, capsys, monkeypatch
):
    name = "attention scores of 2 heads x 16 x 16 in FP32, 2 sequences, 2 layers, and its words"
    memory = Estimate((Part(name, 16 * 2**10),))
    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: _cost(60.0, memory=memory))
    monkeypatch.setattr(run_study, "plan_study", lambda *_: [])
    monkeypatch.setattr(run_study, "may_pass", lambda *_: False)
    assert main(["estimate", str(write_study(lambda _: None))]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert f" 16.0 KiB {name}" in " ".join(text.split())


def test_of_a_short_study_it_says_nothing_of_what_shortens_it(write_study, capsys, monkeypatch):
    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: _cost(60.0))
    monkeypatch.setattr(run_study, "plan_study", lambda *_: [])
    monkeypatch.setattr(run_study, "may_pass", lambda *_: False)
    assert main(["estimate", str(write_study(lambda _: None))]) == 0
    assert "train.steps" not in capsys.readouterr().out


@pytest.mark.parametrize("is_whole", [True, False])
def test_that_nothing_is_missing_for_a_pass_is_said_where_that_is_so(
    write_study, capsys, monkeypatch, is_whole
):
    """A study of our own trainer has a held-out loss: its plan tells all of it."""

    def edit(content):
        content.update(yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()))
        if not is_whole:
            del content["arms"]["nudge"], content["arms"]["nudge_2"]

    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: _cost(60.0))
    assert main(["estimate", str(write_study(edit))]) == 0
    said = capsys.readouterr().out.splitlines()
    line = "PASS    nothing that it needs is missing, as far as it is planned and tried;"
    assert [x for x in said if "PASS" in x] == [line] * is_whole
    assert ("        whether its seeds are enough shows in the runs" in said) == is_whole


def test_too_few_seeds_for_a_look_are_told_ahead(write_study, capsys, monkeypatch):
    """An estimate of two seeds said nothing, and so did the run, until all were trained."""

    def edit(content):
        content.update(yaml.safe_load((ROOT / "configs" / "quickstart.yaml").read_text()))
        content["seeds"] = [0, 1]

    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: _cost(60.0))
    path = write_study(edit)
    assert main(["estimate", str(path)]) == 0
    few = "it has 2 of the 3 seeds of the first look: `stability run` with --seeds 3 trains more"
    said = " ".join(capsys.readouterr().out.split())
    assert said.endswith(f"PASS none, as the study is planned: - {few}")
    study = load_study(path)
    runs = run_study.plan_study(study, Path("runs"))
    assert run_study.too_few_seeds(study, runs) == few
    assert run_study.too_few_seeds(replace(study, seeds=(0, 1, 2)), runs) == ""
    others = [run for run in runs if run.arm.role != "broken"]
    assert run_study.too_few_seeds(study, others) == "", "it can't pass anyway"


def test_what_takes_how_long_is_said_in_parts(write_study, capsys, monkeypatch):
    measuring = MeasuringCost(distances=8.0, planted=43.0, planted_most=5399.0, report=3.0)
    cost = _cost(144.0, measuring=measuring)
    monkeypatch.setattr(cost_estimate, "cost_of", lambda *_, **__: cost)
    monkeypatch.setattr(run_study, "plan_study", lambda *_: [])
    monkeypatch.setattr(run_study, "may_pass", lambda *_: False)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    path = write_study(lambda _: None)
    assert main(["estimate", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1:6] == [
        "time    3.3 minutes here, of which",
        "         2.4 minutes  9 runs, one after another",
        "           8 seconds  distances between them",
        "          43 seconds  faults planted on what may pass; 90.0 minutes at most",
        "           3 seconds  the report",
    ]
    assert max(map(len, lines)) <= 80
    assert main(["estimate", str(path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["hours"] == pytest.approx((144 + 8 + 43 + 3) / 3600)
    assert told["hours_of_runs"] == pytest.approx(144 / 3600)
    assert told["hours_of_measuring"]["planted_faults_at_most"] == pytest.approx(5399 / 3600)


def test_each_timing_is_told_before_it_is_made(write_study, tmp_path, monkeypatch):
    told = []
    trial = Trial(
        update_seconds=1.0,
        look_seconds=2.0,
        gradient_seconds=0.0,
        snapshot_seconds=0.5,
        start_seconds=10.0,
        distance_seconds=0.1,
        update_bytes=1.0,
        look_bytes=1.0,
        gradient_bytes=1.0,
        fixed_bytes=1,
    )
    monkeypatch.setattr(
        cost_estimate, "_timed", lambda config, *, isolated: told.append("timed") or trial
    )
    runs = plan_study(load_study(write_study(small)), tmp_path / "runs")
    cost = cost_of(runs, "none", told=told.append)
    # the nudge is a baseline, and the one that is looked at
    assert told == [
        "3 runs are of 2 kinds: up to 14 updates are timed in all",
        "timing 1 of 2: baseline, seed 0: up to 7 updates, some with the probe",
        "timed",
        "timing 2 of 2: fp32, seed 0: up to 7 updates, some with the probe",
        "timed",
    ]
    assert cost.run_seconds == sum(cost.seconds_by_arm.values())
    # one snapshot between the first and the last, and two checkpoints
    assert cost.seconds_by_arm["short"] == 10 + 4 + 3 * 0.5
    # each look adds 2 s to an update of 1 s
    updates = sum(run.last_step for run in runs)
    kept = sum(_kept_beside(run) for run in runs)
    assert cost.run_seconds - cost.look_seconds == 3 * 10 + updates + 0.5 * kept
    # a tenth for a pair of files: as the run ends that is no control, of three at four steps
    assert cost.measuring.distances == pytest.approx(0.1 * 3 * 4 / 2)
    assert cost.measuring.planted == 0
    assert cost.seconds == cost.run_seconds + cost.measuring.seconds


def test_faults_are_counted_by_gradients_of_as_many_sequences(write_study, tmp_path, monkeypatch):
    """A look at the gradient adds 6 s: three gradients, of 2 of a batch's 4 sequences."""
    trial = Trial(
        update_seconds=1.0,
        look_seconds=1.0,
        gradient_seconds=6.0,
        snapshot_seconds=0.0,
        start_seconds=0.0,
        distance_seconds=0.0,
        update_bytes=1.0,
        look_bytes=1.0,
        gradient_bytes=1.0,
        fixed_bytes=1,
    )
    monkeypatch.setattr(cost_estimate, "_timed", lambda config, *, isolated: trial)
    flash = {"implementation": "flash", "profile": "fa2"}
    probe = {"every": 1, "gradient_every": 2, "gradient_sequences": 2}

    def edit(content):
        content["arms"] = {
            "baseline": {},
            "fa2": {"attention": flash, "probe": probe},
            "unlooked": {"attention": {**flash, "profile": "all_bf16"}, "probe": {"every": 1}},
            "broken": {"attention": {**flash, "fault": "out_gain_1pct"}, "role": "broken"},
            "fp32": {"precision": "32-true"},
        }

    study = load_study(write_study(edit))
    runs = plan_study(study, tmp_path / "runs")
    measuring = cost_of(runs, "all", isolated=False).measuring
    # of the one without looks at the gradient: three updates each
    assert measuring.planted == USUAL * (4 + 3)
    assert measuring.planted_most == (96 * (3 + 7) + 3 * 12) * (4 + 3)
    named = replace(study.policy, candidates=("fa2",))
    assert cost_of(runs, "all", policy=named, isolated=False).measuring.planted == USUAL * 4
    whole = [run for run in runs if run.arm.role != "broken"]
    assert cost_of(whole, "all", isolated=False).measuring.planted == 0


def trial_of(updates, monkeypatch, *, whole, **probe):
    """Return the trial of an arm whose updates take and log so much, each given by both."""
    made = arm_trial._Trained(
        seconds=[seconds for seconds, _ in updates],
        log=[size for _, size in updates],
        whole=whole,
        fixed=7,
        distance=3.0,
    )
    asked = []
    monkeypatch.setattr(arm_trial, "_trained", lambda config, *_: asked.append(config) or made)
    model = ModelConfig(depth=1, width=8, heads=1, context=8)
    arm = ArmConfig(model=model, train=TrainConfig(steps=100), probe=ProbeConfig(**probe))
    found = arm_trial._time_arm(arm, ALONE)
    return found, asked[0].probe


def test_looks_and_a_snapshot_are_no_part_of_an_update_and_the_first_ones_count_once(monkeypatch):
    """An update takes 1 s, a look adds 10 and one at the gradient 100; a snapshot takes 2."""
    looked = {**dict.fromkeys((3, 6, 9), (11, 50)), **dict.fromkeys((5, 10), (101, 700))}
    updates = [(150, 900), (3, 10), *(looked.get(i, (1, 10)) for i in range(2, 12))]
    found, probe = trial_of(updates, monkeypatch, whole=500, every=7, gradient_every=20)
    assert (found.update_seconds, found.look_seconds, found.gradient_seconds) == (1, 10, 100)
    assert (found.update_bytes, found.look_bytes, found.gradient_bytes) == (10, 40, 690)
    assert found.snapshot_seconds == 2
    # less 12 updates, 4 looks and 3 at the gradient, those of the first update too
    assert found.start_seconds == 500 - 12 - 40 - 300 - 2
    due = [Schedule(every=every) for every in (probe.every, probe.gradient_every)]
    assert [[step for step in range(12) if each.is_due(step)] for each in due] == [
        [0, 3, 6, 9],
        [0, 5, 10],
    ]


def test_without_a_probe_all_updates_are_alike(monkeypatch):
    updates = [(9, 10), (3, 10), *[(1, 10)] * 10]
    found, probe = trial_of(updates, monkeypatch, whole=100, every=0)
    assert not probe.is_on
    assert (found.update_seconds, found.look_seconds, found.gradient_seconds) == (1, 0, 0)
    assert found.start_seconds == 100 - 12 - 2


@pytest.mark.parametrize(("seconds", "made"), [(0.5, 6), (30, 4)], ids=["8 s", "the least"])
def test_a_trial_ends_once_it_takes_long(monkeypatch, seconds, made):
    """As Lightning tells it of four micro-batches an update; it begins to count after the first."""
    now = [0.0]
    monkeypatch.setattr(arm_trial.time, "perf_counter", lambda: now[0])
    clock = arm_trial._Clock(SimpleNamespace(position=lambda: 0), least=4, longest_s=8.0)
    trainer = SimpleNamespace(global_step=0, should_stop=False)
    clock.on_train_batch_start()
    for batch in range(1, 100):
        now[0] += 30 if batch <= 4 else seconds
        trainer.global_step = batch // 4
        clock.on_train_batch_end(trainer)
        if trainer.should_stop:
            break
    assert trainer.global_step == made
    took = [later - sooner for sooner, later in pairwise(clock.times)]
    assert took == [120, *([4 * seconds] * (made - 1))]


@pytest.mark.slow
def test_a_run_over_ranks_is_timed_over_as_many(write_study, tmp_path):
    def edit(content):
        content.update(arms={"baseline": {}}, seeds=[0], yardstick="")
        content["base"]["parallel"] = {"shard": 2}

    (run,) = plan_study(load_study(write_study(edit)), tmp_path / "runs")
    cost = cost_of([run], "all")
    assert 0.01 < cost.seconds < 1000
    assert cost.disk["records"] > 1000
    assert not (tmp_path / "runs").exists()


def _fail_on_the_second(config, ranks):
    if ranks.rank == 1:
        raise ValueError("no room here")
    time.sleep(600)


def test_a_rank_that_fails_is_named_and_the_others_are_not_waited_for():
    with pytest.raises(RuntimeError, match="rank 1: ValueError: no room here"):
        call_over_ranks(2, _fail_on_the_second, None)
