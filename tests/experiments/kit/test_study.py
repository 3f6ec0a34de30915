"""A study is trained once, shared, and only proven pairs of it are measured."""

import math
import shutil

import pytest
import torch

from experiments.kit import study as experiment_study
from experiments.kit.study import (
    STABLE,
    at_step,
    drift_of_pairs,
    log_scatter,
    pair_drift,
    ratio_at,
    shipped_study,
    slopes,
    updates_left_out,
)
from stability.analysis.study_records import read_study
from stability.config.load import load_study
from stability.records.paths import RunPaths

pytestmark = pytest.mark.slow


def _two(content):
    content["seeds"] = [0]


def test_what_has_ended_is_kept_and_further_arms_are_added(write_study, tmp_path, capsys):
    study, kept = load_study(write_study(_two)), tmp_path / "kept"
    threads = torch.get_num_threads()
    first = drift_of_pairs(study, {"A/A": ("rerun", "baseline")}, str(kept))
    assert {row["w1"] for row in first} == {0.0}
    assert [row["step"] for row in first] == [0, 1, 2, 4, 6]
    assert "kept" not in capsys.readouterr().err
    pairs = {"fp32": ("baseline", "fp32"), "A/A": ("rerun", "baseline")}
    second = drift_of_pairs(study, pairs, str(kept))
    assert [row for row in second if row["pair"] == "A/A"] == first
    assert all(row["w1"] > 0 for row in second if row["pair"] == "fp32" and row["step"] == 6)
    shown = capsys.readouterr().err
    assert shown.count("already trained, kept") == 2
    assert {path.parent.name for path in kept.glob("*/tiny/*/seed-0")} == {
        "baseline",
        "rerun",
        "fp32",
    }
    assert torch.get_num_threads() == threads


def test_runs_of_other_code_are_not_read(write_study, tmp_path, monkeypatch):
    study, pairs = load_study(write_study(_two)), {"A/A": ("rerun", "baseline")}
    source = tmp_path / "code" / "stability" / "model"
    source.mkdir(parents=True)
    monkeypatch.setattr(experiment_study, "REPOSITORY", tmp_path / "code")
    for code in ("a = 1", "a = 2"):
        (source / "gpt.py").write_text(code)
        drift_of_pairs(study, pairs, str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").glob("*/tiny/baseline/seed-0"))) == 2


def test_updates_that_a_loss_scaler_leaves_out_are_counted(write_study, tmp_path):
    def edit(content):
        _two(content)
        content["arms"]["narrow"] = {"precision": "emulated:e4m3"}
        content["base"]["train"]["checkpoint_every"] = 6

    study = load_study(write_study(edit))
    rows = drift_of_pairs(study, {"narrow": ("narrow", "fp32"), "A/A": ("rerun", "baseline")})
    assert {row["left_out"] for row in rows if row["pair"] == "A/A"} == {0}
    (left_out,) = {row["left_out"] for row in rows if row["pair"] == "narrow"}
    assert 0 < left_out <= 6
    with pytest.raises(ValueError, match=r"updates_left_out: .* must hold a checkpoint, has none"):
        updates_left_out(RunPaths(tmp_path))


def test_a_run_that_does_not_reach_its_end_is_told(write_study, tmp_path):
    def edit(content):
        _two(content)
        own = "tests.stability.study.own_attentions:not_a_number"
        content["arms"]["broken"] = {"attention": {"implementation": own}}

    study = load_study(write_study(edit))
    with pytest.raises(ValueError, match=r"1 of 2 did not; first .*broken/seed-0: diverged, the l"):
        drift_of_pairs(study, {"broken": ("broken", "baseline")}, str(tmp_path / "kept"))


def test_each_size_of_the_shipped_study_loads():
    weights = {}
    for size, overrides in STABLE.items():
        study = shipped_study("stable", overrides)
        model = study.base.model
        weights[size] = 12 * model.depth * model.width**2
        assert len(study.seeds) == 5
        assert study.base.train.accelerator == ("gpu" if size == "gpu" else "cpu")
    assert weights["quick"] < weights["cpu"] < weights["gpu"]


def test_against_the_baseline_it_is_what_the_run_logged(trained):
    rows = pair_drift(trained, "fp32", "baseline", [0, 1])
    assert [(row["seed"], row["step"]) for row in rows] == [
        (seed, step) for seed in (0, 1) for step in (0, 1, 2, 4, 6)
    ]
    arm = read_study(trained).arm("fp32")
    assert arm
    for metric in ("w1", "rel_l2", "max_abs"):
        for seed in (0, 1):
            logged = arm.runs[seed].drift(metric)
            assert {r["step"]: r[metric] for r in rows if r["seed"] == seed} == logged
            assert logged[6] > 0


def test_the_second_arm_is_the_reference(trained):
    forth, back = (
        [row["rel_l2"] for row in pair_drift(trained, *pair, [0])]
        for pair in (("baseline", "init_seed"), ("init_seed", "baseline"))
    )
    assert forth != back
    arm = read_study(trained).arm("init_seed")
    assert arm
    assert back == list(arm.runs[0].drift("rel_l2").values())


def test_arms_that_differ_in_two_axes_are_no_pair(trained, write_study, run_tiny, tmp_path):
    with pytest.raises(
        ValueError, match="flash_fa2 and fp32 must differ in one axis alone, seed 0: no pair"
    ):
        pair_drift(trained, "flash_fa2", "fp32", [0])

    def edit(content):
        flash = content["arms"]["flash_fa2"]
        content["arms"] = {"baseline": {}, "both": {"precision": "32-true", **flash}}
        content |= {"seeds": [0], "allow_many": True, "yardstick": ""}

    run_tiny(load_study(write_study(edit)), tmp_path)
    with pytest.raises(
        ValueError, match=r"one axis alone, seed 0: .*differ in attention, precision"
    ):
        pair_drift(tmp_path / "tiny", "both", "baseline", [0])


def test_a_damaged_record_is_no_pair(trained, tmp_path):
    study = tmp_path / "tiny"
    shutil.copytree(trained, study)
    snapshot = RunPaths.for_run(study, "fp32", 1).snapshot(2)
    snapshot.write_bytes(snapshot.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match=r"seed 1: no pair: records of fp32"):
        pair_drift(study, "fp32", "baseline", [0, 1])


def test_rows_are_picked_by_pair_and_step_and_slopes_are_robust():
    rows = [
        {"pair": pair, "seed": seed, "step": step, "w1": rate * step + (100 if step == 3 else 0)}
        for pair, rate in (("a", 2.0), ("b", 5.0))
        for seed in (0, 1)
        for step in (4, 0, 1, 2, 3, 5, 6)
    ]
    assert at_step(rows, "b", "w1", 4) == {0: 20.0, 1: 20.0}
    assert slopes(rows, "a", "w1") == pytest.approx({0: 2.0, 1: 2.0})
    assert ratio_at(rows, "b", "a", "w1", 2) == {0: 2.5, 1: 2.5}


def test_log_scatter_is_the_standard_deviation_of_the_logs():
    assert log_scatter({0: 1.0, 1: 1.0, 2: math.e}) == pytest.approx(math.sqrt(1 / 3))
    assert log_scatter({0: 2.0, 1: 2.0}) == 0


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "log_scatter: values must be of at least two seeds, got 0"),
        ({0: 1.0}, "log_scatter: values must be of at least two seeds, got 1; one seed does not"),
        ({0: 1.0, 1: 0.0}, r"values must be positive, got 0\.0 at seed 1"),
        ({0: -2.0, 1: 1.0}, r"values must be positive, got -2\.0 at seed 0"),
        ({0: math.nan, 1: 1.0}, r"values must be positive, got nan at seed 0"),
    ],
)
def test_what_has_no_scatter_of_logs_is_an_error(values, said):
    with pytest.raises(ValueError, match=said):
        log_scatter(values)
