"""A study read anew, in part from what is known of it, and one that somebody else has written."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from stability.analysis import study_records
from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_names import ULP_HISTOGRAM, deviation_name
from stability.records.parallel_reading import ReaderProcess
from stability.records.paths import StudyPaths
from stability.records.sealed_json import read_sealed, write_sealed
from stability.report.page.html import write_page
from tests.sampling import one_in
from tests.stability.sealing import seal


@pytest.fixture
def study(synthetic, tmp_path):
    return synthetic.write_synthetic(tmp_path / "quickstart")


def runs_of(study):
    return {(arm.name, seed): run for arm in study.arms for seed, run in arm.runs.items()}


def test_only_runs_whose_files_have_changed_are_read_again(study):
    first = read_study(study)
    log = study / "fp32" / "seed-1" / "metrics.jsonl"
    log.write_text(log.read_text() + seal({"step": 1, "x": 1.0}))
    shutil.copy(study / "rerun" / "seed-0" / "manifest.json", study / "nudge" / "seed-0")
    again = read_study(study, first)
    before, after = runs_of(first), runs_of(again)
    changed = [key for key in before if after[key] is not before[key]]
    assert changed == [("nudge", 0), ("fp32", 1)]
    assert after["fp32", 1].series("x") == {1: 1.0}
    assert read_study(study, again) == again


def test_a_log_of_the_same_size_that_was_written_later_is_read_again(study):
    first = read_study(study)
    log = study / "fp32" / "seed-1" / "metrics.jsonl"
    stamp = log.stat()
    os.utime(log, ns=(stamp.st_atime_ns, stamp.st_mtime_ns + 1))
    again = read_study(study, first)
    assert runs_of(again)["fp32", 1] is not runs_of(first)["fp32", 1]


def test_a_run_that_could_not_be_read_is_tried_again(study):
    log = study / "fp32" / "seed-1" / "metrics.jsonl"
    sound = log.read_bytes()
    log.write_bytes(b"x" + sound[1:])
    stamp = log.stat()
    spoiled = read_study(study)
    assert "line 1 must be JSON" in runs_of(spoiled)["fp32", 1].error
    log.write_bytes(sound)
    os.utime(log, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert runs_of(read_study(study, spoiled))["fp32", 1].error == ""


def test_histograms_come_with_the_run(study):
    name = deviation_name("layer_0", "out", ULP_HISTOGRAM)
    log = study / "fp32" / "seed-1" / "metrics.jsonl"
    log.write_text(log.read_text() + seal({"step": 20, name: [0, 3, 1]}))
    runs = runs_of(read_study(study))
    assert runs["fp32", 1].counts == {name: {20: [0, 3, 1]}}
    assert runs["fp32", 0].counts == {}


@pytest.mark.parametrize(
    "name", one_in(3, ["../outside", "<script>x</script>", "..", "a" * 300, "", "a/b"])
)
def test_an_arm_that_can_have_no_folder_has_failed_and_none_is_touched(study, name):
    outside = study.parent / "outside" / "seed-0"
    shutil.copytree(study / "fp32" / "seed-0", outside)
    content = read_sealed(StudyPaths(study).study, "")
    content["arms"].append({"name": name, "axis": "none", "diff": {}})
    write_sealed(StudyPaths(study).study, content)
    read = read_study(study)
    arm = read.arm(name)
    for run in arm.runs.values():
        assert run.state == "failed"
        assert "arm must be 1 to 64 letters, digits, dots, '_' or '-', got" in run.message
        assert not run.metrics
        assert study in run.paths.root.parents
        assert ".." not in run.paths.root.parts
    assert ladder_of(read).row(name).state == "failed"
    text = write_page(read_study(study), study).read_text()
    assert "<script>x" not in text
    assert read_study(study, read).arm(name).runs == arm.runs


@pytest.mark.parametrize("start", ["works", "fails"])
def test_several_processes_read_what_one_does(study, monkeypatch, start):
    (study / "fp32" / "seed-0" / "metrics.jsonl").write_text("x\n")
    alone = read_study(study)
    started = []

    class Counted(ReaderProcess):
        def __init__(self, function):
            started.append(self)
            if start == "fails":
                raise BlockingIOError("no more processes")
            super().__init__(function)

    monkeypatch.setattr(study_records, "ReaderProcess", Counted)
    monkeypatch.setattr(study_records, "WORTH_A_PROCESS", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    with ThreadPoolExecutor(1) as thread:  # as a server does
        together = thread.submit(read_study, study).result()
    assert len(started) == (2 if start == "works" else 1)
    assert together == alone
    assert "line 1 must be JSON" in runs_of(together)["fp32", 0].error
    read_study(study, together)
    assert len(started) == (2 if start == "works" else 1), "a known study is read by one"


def test_a_study_of_before_there_were_roles_has_those_that_follow_from_its_changes(study):
    assert {arm.name: (arm.role, arm.until) for arm in read_study(study).arms} == {
        "baseline": ("baseline", 200),
        "flash_all_bf16": ("candidate", 200),
        "flash_fa2": ("candidate", 200),
        "rerun": ("rerun", 200),
        "nudge": ("nudge", 200),
        "fp32": ("yardstick", 200),
        "init_seed": ("yardstick", 200),
    }


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("role", "hero", "role of 'rerun' must be one of baseline, .*, yardstick, is 'hero'"),
        ("until", "20", "arms.3.until must be of type int, is '20'"),
    ],
)
def test_a_role_or_end_that_is_none_is_refused(study, key, value, message):
    path = StudyPaths(study).study
    content = read_sealed(path, writer="`stability run`")
    content["arms"][3][key] = value
    write_sealed(path, content)
    with pytest.raises(ValueError, match=message):
        read_study(study)


@pytest.mark.parametrize(
    ("axis", "diff"),
    [
        ("attention", {"optimizer.lr": [1, 2]}),
        ("none", {"optimizer.lr": [1, 2]}),
        ("optimizer.lr", {"optimizer.lr": [1, 2], "precision": ["a", "b"]}),
        ("optimizer", {}),
    ],
)
def test_an_arm_whose_axis_does_not_hold_what_differs_is_refused(study, axis, diff):
    content = read_sealed(StudyPaths(study).study, "")
    content["arms"][3].update(axis=axis, diff=diff)
    write_sealed(StudyPaths(study).study, content)
    with pytest.raises(ValueError, match=rf"axis of 'rerun' must hold all .*, is '{axis}'"):
        read_study(study)


@pytest.mark.parametrize(
    ("axis", "diff", "today"),
    [
        ("seed", {"seed.init_offset": [0, 1]}, "seed.init_offset"),
        ("optimizer_eps", {"optimizer.eps": [1, 2]}, "optimizer.eps"),
        ("optimizer", {"optimizer.lr": [1, 2], "optimizer.eps": [1, 2]}, "optimizer"),
        ("many", {"optimizer.lr": [1, 2], "precision": ["a", "b"]}, "many"),
    ],
)
def test_axes_of_older_studies_have_todays_names(study, axis, diff, today):
    content = read_sealed(StudyPaths(study).study, "")
    content["arms"][3].update(axis=axis, diff=diff)
    write_sealed(StudyPaths(study).study, content)
    assert read_study(study).arms[3].axis == today


def test_an_arm_that_is_listed_twice_is_refused(study):
    content = read_sealed(StudyPaths(study).study, "")
    content["arms"].append({**content["arms"][1], "role": "broken"})
    write_sealed(StudyPaths(study).study, content)
    name = content["arms"][1]["name"]
    with pytest.raises(ValueError, match=rf"study\.json lists the arm '{name}' twice"):
        read_study(study)


def test_a_seed_that_is_listed_twice_is_refused(study, capsys):
    content = read_sealed(StudyPaths(study).study, "")
    content["config"]["seeds"] = [0, 1, 0]
    write_sealed(StudyPaths(study).study, content)
    with pytest.raises(ValueError, match=r"study\.json lists seed 0 twice, in \[0, 1, 0\]"):
        read_study(study)
    with pytest.raises(SystemExit) as caught:
        main(["verdict", str(study)])
    assert caught.value.code == 2
    assert "lists seed 0 twice" in capsys.readouterr().err


def _swap(first, second):
    kept = first.rename(first.with_name("kept"))
    second.rename(first)
    kept.rename(second)


def test_records_in_the_folder_of_another_arm_are_not_read(study):
    before = read_study(study)
    _swap(study / "flash_fa2", study / "flash_all_bf16")
    runs = runs_of(read_study(study, before))
    for seed in before.seeds:
        run = runs["flash_fa2", seed]
        assert (run.state, run.manifest, dict(run.metrics)) == ("failed", None, {})
        assert f"records belong to arm flash_all_bf16, seed {seed}" in run.message
        assert f"records belong to arm flash_fa2, seed {seed}" in (
            runs["flash_all_bf16", seed].message
        )
        assert runs["baseline", seed].error == ""
    _swap(study / "flash_fa2", study / "flash_all_bf16")
    assert runs_of(read_study(study)) == runs_of(before)


def test_a_seed_that_was_copied_is_not_another_seed(study):
    shutil.rmtree(study / "fp32" / "seed-1")
    shutil.copytree(study / "fp32" / "seed-0", study / "fp32" / "seed-1")
    runs = runs_of(read_study(study))
    assert runs["fp32", 1].message.endswith("records belong to arm fp32, seed 0")
    assert runs["fp32", 0].error == ""


def test_records_of_another_study_are_not_read(study):
    manifest = study / "fp32" / "seed-1" / "manifest.json"
    write_manifest(manifest, replace(read_manifest(manifest), study="other"))
    message = runs_of(read_study(study))["fp32", 1].message
    assert message.endswith("records belong to arm fp32, seed 1 of study other")


def test_a_study_in_a_folder_of_another_name_is_read(study):
    before = read_study(study)
    moved = study.rename(study.with_name("moved"))
    runs = runs_of(read_study(moved))
    assert not any(run.error for run in runs.values())
    assert {key: run.metrics for key, run in runs.items()} == {
        key: run.metrics for key, run in runs_of(before).items()
    }


@pytest.mark.parametrize("verb", one_in(2, ["verdict", "show", "verify", "report"]))
def test_every_verb_says_whose_records_lie_in_a_folder(trained, tmp_path, capsys, verb):
    folder = shutil.copytree(trained, tmp_path / "tiny")
    _swap(folder / "flash_fa2", folder / "fp32")
    main([verb, str(folder)])
    said = capsys.readouterr().out
    if verb == "report":
        said = StudyPaths(folder).report.read_text()
    assert "records belong to arm fp32, seed" in " ".join(said.split())


def test_a_command_that_still_trains_is_no_broken_pair(study):
    """Its start is not on record before it ends; one that has ended without it is no pair."""
    folder = study / "fp32" / "seed-1"
    whole = read_manifest(folder / "manifest.json")
    hashes = {name: said for name, said in whole.hashes.items() if name != "init_weights"}
    write_manifest(folder / "manifest.json", replace(whole, state="running", hashes=hashes))
    run = runs_of(read_study(study))["fp32", 1]
    assert (run.state, run.breach, run.metrics) == ("stopped", "", {}), "no process holds it"
    write_manifest(folder / "manifest.json", replace(whole, hashes=hashes))
    run = runs_of(read_study(study))["fp32", 1]
    assert run.state == "failed"
    assert "hashes.init_weights must be the baseline's" in run.breach
    write_manifest(folder / "manifest.json", replace(whole, state="running"))
    assert runs_of(read_study(study))["fp32", 1].metrics, "a start on record is held against"


def test_a_baseline_that_is_trained_anew_breaks_no_pair_of_the_arms_that_are_kept(study):
    path = study / "baseline" / "seed-1" / "manifest.json"
    whole = read_manifest(path)
    hashes = {name: said for name, said in whole.hashes.items() if name != "init_weights"}
    write_manifest(path, replace(whole, state="running", hashes=hashes))
    run = runs_of(read_study(study))["fp32", 1]
    assert (run.state, run.breach, run.metrics) == ("finished", "", {})
