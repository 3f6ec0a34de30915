"""A shared study is trained once, arm by arm as asked for, and not read where the code differs."""

import pytest
import torch

from experiments.kit import study as experiment_study
from experiments.kit.study import STABLE, drift_of_pairs, shipped_study
from stability.config.load import load_study
from stability.records.paths import RunPaths
from stability.study.checkpoints import updates_left_out


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
    assert {path.name for path in kept.glob("*/tiny/*") if path.is_dir()} == {
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
