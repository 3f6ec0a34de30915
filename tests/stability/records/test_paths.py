"""Where a study's files are, and the names that can't lead out of its folder."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stability.records.paths import RunPaths, StudyPaths, list_runs, snapshot_steps


def test_the_layout_is_the_documented_one(tmp_path):
    run = RunPaths.for_run(tmp_path / "quickstart", "flash_fa2", 3)
    relative = {
        name: str(getattr(run, name).relative_to(tmp_path))
        for name in ("manifest", "metrics", "snapshots_dir", "checkpoints_dir", "wandb_dir")
    }
    folder = "quickstart/flash_fa2/seed-3"
    assert relative == {
        "manifest": f"{folder}/manifest.json",
        "metrics": f"{folder}/metrics.jsonl",
        "snapshots_dir": f"{folder}/snapshots",
        "checkpoints_dir": f"{folder}/checkpoints",
        "wandb_dir": f"{folder}/wandb",
    }
    assert run.snapshot(40) == run.root / "snapshots" / "step-00000040.safetensors"
    assert (run.arm, run.seed) == ("flash_fa2", 3)
    study = StudyPaths(tmp_path)
    names = [path.name for path in (study.study, study.ladder, study.report)]
    assert names == ["study.json", "ladder.json", "report.html"]
    assert list(tmp_path.iterdir()) == []


def test_a_file_has_one_name_whichever_way_its_folder_was_reached(tmp_path, monkeypatch):
    real = RunPaths.for_run(tmp_path / "real", "arm", 0)
    real.snapshots_dir.mkdir(parents=True)
    (tmp_path / "linked").symlink_to(tmp_path / "real")
    linked = RunPaths.for_run(tmp_path / "linked", "arm", 0)
    monkeypatch.chdir(tmp_path)
    relative = RunPaths.for_run(Path("linked"), "arm", 0)
    for paths in (real, linked, relative):
        for path in (real.snapshot(2), paths.snapshot(2)):
            assert paths.name_of(path) == "snapshots/step-00000002.safetensors"


BAD_NAMES = [
    "",
    ".",
    "..",
    "...",
    "../x",
    "a/b",
    "/etc",
    "a\\b",
    "a\0b",
    "a b",
    "a\n",
    "é",
    "a" * 65,
]


@pytest.mark.parametrize("arm", BAD_NAMES)
def test_a_name_that_could_lead_out_is_refused(tmp_path, arm):
    with pytest.raises(ValueError, match=r"RunPaths\.for_run: arm must be 1 to 64 letters"):
        RunPaths.for_run(tmp_path, arm, 0)


@settings(max_examples=100)
@given(st.text(max_size=8))
def test_an_accepted_name_is_a_folder_of_the_study(tmp_path_factory, arm):
    study = tmp_path_factory.getbasetemp() / "study"
    try:
        run = RunPaths.for_run(study, arm, 0)
    except ValueError:
        return
    assert run.root.resolve().parent.parent == study.resolve()


def test_negative_seeds_and_steps_are_refused(tmp_path):
    with pytest.raises(ValueError, match="seed must be >= 0, got -1"):
        RunPaths.for_run(tmp_path, "arm", -1)
    with pytest.raises(ValueError, match="step must be >= 0, got -1"):
        RunPaths.for_run(tmp_path, "arm", 0).snapshot(-1)


def test_runs_are_found_by_arm_and_seed_in_numeric_order(tmp_path):
    expected = [RunPaths.for_run(tmp_path, arm, seed) for arm in ("a", "b") for seed in (2, 10)]
    for run in reversed(expected):
        run.root.mkdir(parents=True)
    (tmp_path / "a" / "seed-x").mkdir()
    (tmp_path / "b" / "seed-3").write_text("a file")
    assert list_runs(tmp_path) == expected


def test_whole_snapshots_are_listed_and_half_written_ones_are_not(tmp_path):
    run = RunPaths.for_run(tmp_path, "arm", 0)
    assert snapshot_steps(run) == []
    run.snapshots_dir.mkdir(parents=True)
    steps = [0, 7, 100_000_000]
    for step in reversed(steps):
        run.snapshot(step).touch()
    run.snapshot(9).with_name(f".{run.snapshot(9).name}.0a1b.tmp").touch()
    (run.snapshots_dir / "step-final.safetensors").touch()
    assert snapshot_steps(run) == steps
