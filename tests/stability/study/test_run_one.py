"""One run of a study at a time: refused where it has no place, and the same bits as all at once."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from stability.config.load import load_study
from stability.records.paths import RunPaths
from stability.records.run_lock import hold
from stability.study import run_one as module
from stability.study.run_one import run_one
from stability.study.run_study import _settling, finish_study, plan_study
from stability.study.settle import settle_ended
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver
from tests.stability.study.recorded_bits import recorded_bits

ROOT = Path(__file__).parents[3]
OPTIONS = TrainOptions(wandb_mode="disabled")


@pytest.mark.parametrize(
    ("arm", "seed", "said"),
    [
        ("nugde", 0, "only must be one of the study's 7 arms, got 'nugde'; nearest: nudge"),
        ("nudge", 7, "seed must be one of the study's, got 7; it has 0, 1"),
        ("nudge", 1, "trained before nudge, is not; --only baseline --seed 1 trains it"),
    ],
)
def test_a_run_without_a_place_is_refused_and_nothing_is_written(
    write_study, tmp_path, arm, seed, said
):
    study = load_study(write_study())
    with pytest.raises(ValueError, match=said):
        run_one(study, tmp_path / "runs", arm, seed, options=OPTIONS, observer=SilentObserver())
    assert not (tmp_path / "runs").exists()


def test_a_candidate_of_a_baseline_in_training_is_told_to_wait(write_study, tmp_path):
    study = load_study(write_study())
    baseline = plan_study(study, tmp_path)[0]
    with hold(baseline.paths), pytest.raises(ValueError, match="is in training; wait for it"):
        run_one(study, tmp_path, "nudge", 0, options=OPTIONS, observer=SilentObserver())


def test_a_run_that_is_held_is_waited_for(write_study, tmp_path, monkeypatch):
    study, observer = load_study(write_study()), SilentObserver()
    monkeypatch.setattr(module, "PAUSE_S", 0.0)
    held = iter([True, True, False])
    monkeypatch.setattr(module, "is_held", lambda paths: next(held))
    monkeypatch.setattr(module, "check_study", lambda runs, isolated, here: [])
    trained = []
    monkeypatch.setattr(module, "train_in_processes", lambda runs, *rest: trained.extend(runs))
    run = run_one(study, tmp_path, "baseline", 0, options=OPTIONS, observer=observer)
    assert observer.notes == ["another process holds this run; waiting"]
    assert trained == [run]
    # sealed before it trains, and the plan on record is that of the whole study
    assert run.protocol
    assert "nudge" in (tmp_path / "tiny" / "study.json").read_text()


def test_what_follows_the_runs_is_measured_by_one_process(write_study, tmp_path, monkeypatch):
    study, observer = load_study(write_study()), SilentObserver()
    runs = plan_study(study, tmp_path)
    monkeypatch.setattr("stability.records.run_lock.PATIENCE_S", 0.0)
    monkeypatch.setattr("stability.study.settle.PAUSE_S", 0.0)
    steps: list[str] = []
    for file, names in {
        "settle": ("update_distances", "remake_drifts"),
        "run_study": ("freeze_window", "update_assays"),
    }.items():
        for name in names:
            monkeypatch.setattr(
                f"stability.study.{file}.{name}", lambda *rest, n=name, **k: steps.append(n)
            )
    other = hold(RunPaths(tmp_path / "tiny"))
    other.__enter__()

    def let_go(text: str) -> None:
        steps.append("waiting")
        other.__exit__(None, None, None)

    observer.study_noted = let_go
    finish_study(study, runs, observer, isolated=False)
    assert steps == [
        "waiting",
        *["update_distances", "remake_drifts"] * 2,
        "freeze_window",
        "update_assays",
    ]


def test_a_record_that_can_not_be_read_fails_no_run_that_has_trained(
    write_study, tmp_path, monkeypatch
):
    """It is told, and `finish_study` comes to it once more."""

    def damaged(paths):
        raise ValueError(f"{paths.manifest}: is truncated")

    study, observer = load_study(write_study()), SilentObserver()
    runs = plan_study(study, tmp_path)
    monkeypatch.setattr("stability.study.settle.has_ended", damaged)
    told: list[str] = []
    observer.study_noted = told.append
    settle_ended(runs, "none", observer, runs[0].seed)
    (said,) = told
    assert said.startswith("seed 0: not measured yet: ")
    assert "is truncated" in said


def test_runs_on_record_are_not_measured_again_one_by_one(write_study, tmp_path, monkeypatch):
    study, observer = load_study(write_study()), SilentObserver()
    runs = plan_study(study, tmp_path)
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr("stability.study.run_study.has_ended", lambda paths: True)
    monkeypatch.setattr(
        "stability.study.run_study.settle_ended",
        lambda runs, keep, observer, seed, is_over: asked.append((seed, is_over)),
    )
    settle = _settling(runs, "none", observer)
    for run in runs:
        settle(run)
    assert asked == [(seed, True) for seed in study.seeds]


@pytest.mark.long
def test_runs_that_are_trained_one_by_one_have_the_bits_of_the_whole_study(
    write_study, tmp_path, trained
):
    """In two processes at once, as a scheduler would; then the study measures what follows."""

    def edit(content: dict) -> None:
        content["arms"] = {name: content["arms"][name] for name in ("baseline", "nudge", "fp32")}
        content["seeds"] = [0]

    study = write_study(edit)
    path = f"{ROOT}:{ROOT / 'kernels'}"
    line = [sys.executable, "-m", "stability.cli.main", "run", str(study), "--wandb", "disabled"]
    line += ["--out", str(tmp_path)]

    def start(*words: str) -> subprocess.Popen:
        env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen([*line, *words], env=env, stdout=subprocess.DEVNULL)

    assert start("--only", "baseline", "--seed", "0").wait(300) == 0
    others = [start("--only", arm, "--seed", "0") for arm in ("nudge", "fp32")]
    assert [each.wait(300) for each in others] == [0, 0]
    assert not (tmp_path / "tiny" / "distances").exists()
    assert start().wait(300) == 0
    assert (tmp_path / "tiny" / "distances" / "seed-0.json").exists()
    found, whole = recorded_bits(tmp_path / "tiny"), recorded_bits(trained)
    weights = [name for name in found if name.endswith((".safetensors", ".jsonl"))]
    assert weights
    assert [name for name in weights if found[name] != whole[name]] == []
