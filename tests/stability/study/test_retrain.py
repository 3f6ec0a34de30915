"""What was dropped is had again: a run trained anew beside itself, with the same bits or none."""

import json
import re
import shutil
from dataclasses import replace

import pytest

from stability.analysis.study_check import check_pairs
from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.config.load import load_study
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths, checkpoint_steps, snapshot_steps
from stability.records.waterfall_record import read_waterfalls
from stability.study.fork import plan_fork, run_fork
from stability.study.retrain import retrain
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, run_quietly, write_tiny

pytestmark = pytest.mark.slow

ARMS = {
    "baseline": {},
    "flash": {"attention": {"implementation": "flash", "profile": "all_bf16"}},
    "nudge": {"nudge": {"ulps": 1}},
}
CHANGE = "attention={implementation: flash, profile: all_bf16}"


def edited(keep):
    def edit(content):
        content.update(arms=ARMS, seeds=[0], yardstick="", keep=keep)
        content["base"]["train"] |= {"snapshot_steps": [2, 4], "checkpoint_every": 2}
        content["base"]["train"]["keep_checkpoints"] = 0
        content["base"]["probe"] = {"every": 0}

    return edit


def trained(folder, text_file, keep):
    run_quietly(load_study(write_tiny(folder, text_file, edited(keep))), folder / "runs")
    return folder / "runs" / "tiny"


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file):
    """The study that keeps all, for tests that only read it or fork it."""
    return trained(tmp_path_factory.mktemp("whole"), text_file, "all")


@pytest.fixture(scope="module")
def dropped(tmp_path_factory, text_file):
    return trained(tmp_path_factory.mktemp("dropped"), text_file, "none")


@pytest.fixture
def study(dropped, tmp_path):
    """A copy of the study that keeps nothing."""
    return shutil.copytree(dropped, tmp_path / "tiny")


def run_of(study, arm):
    return RunPaths.for_run(study, arm, 0)


def content_of(paths):
    return {
        path.relative_to(paths.root): path.read_bytes()
        for path in paths.root.rglob("*")
        if path.is_file()
    }


@pytest.mark.parametrize("arm", ARMS)
def test_a_run_is_trained_anew_to_its_own_bits_and_its_records_stay_as_they_are(study, arm):
    known, observer = run_of(study, arm), SilentObserver()
    before = content_of(known)
    found = retrain(known, "its checkpoint of step 4", observer, isolated=False)
    assert found == RunPaths.for_run(study / "forks", arm, 0)
    assert snapshot_steps(found) == [0, 2, 4, 6]
    assert checkpoint_steps(found) == [2, 4, 6]
    old, new = (read_manifest(paths.manifest) for paths in (known, found))
    assert old.hashes["final_weights"] == new.hashes["final_weights"]
    dropped = {x: sha for x, sha in old.dropped.items() if x.startswith("snapshots/")}
    assert dropped
    assert dropped.items() <= new.files.items()
    assert content_of(known) == before
    (said,) = observer.notes
    assert "its checkpoint of step 4 was dropped by the study's keep" in said
    assert "trained anew, 6 updates" in said
    # a second time it is there
    assert retrain(known, "its checkpoint", observer, isolated=False) == found
    assert observer.ended[-1][2:] == ("finished", "kept")
    # and the study is what it was
    assert {check.state for check in check_pairs(read_study(study))} == {"holds"}


def test_other_bits_are_refused_with_what_differs(study):
    known = run_of(study, "baseline")
    manifest = read_manifest(known.manifest)
    other = {**manifest.dropped, "snapshots/step-00000004.safetensors": "0" * 64}
    environment = {**manifest.environment, "package.torch": "1.0"}
    write_manifest(known.manifest, replace(manifest, dropped=other, environment=environment))
    with pytest.raises(
        ValueError,
        match=r"other bits: environment\.package\.torch must be the first one.* can't be had",
    ):
        retrain(known, "its checkpoint", SilentObserver(), isolated=False)
    # the same machine, and other weights all the same
    write_manifest(known.manifest, replace(manifest, dropped=other))
    with pytest.raises(
        ValueError, match=r"step-00000004\.safetensors is another file; move .* away"
    ):
        retrain(known, "its checkpoint", SilentObserver(), isolated=False)


def test_another_machine_with_the_same_bits_is_taken(study):
    known = run_of(study, "baseline")
    manifest = read_manifest(known.manifest)
    environment = {**manifest.environment, "package.torch": "1.0"}
    write_manifest(known.manifest, replace(manifest, environment=environment))
    assert retrain(known, "its checkpoint", SilentObserver(), isolated=False)


def test_a_run_of_a_command_is_refused(study):
    known = run_of(study, "baseline")
    manifest = read_manifest(known.manifest)
    write_manifest(known.manifest, replace(manifest, config={"program": "train.py"}))
    with pytest.raises(ValueError, match="must be a run of our own trainer to be trained anew"):
        retrain(known, "its checkpoint", SilentObserver())


def test_a_training_that_fails_is_told(study, text_file, monkeypatch):
    known = run_of(study, "baseline")
    manifest = read_manifest(known.manifest)
    failed = replace(manifest, state="failed", message="no such text")
    monkeypatch.setattr("stability.study.retrain.run_fork", lambda *_, **__: failed)
    with pytest.raises(ValueError, match="failed: no such text"):
        retrain(known, "its checkpoint", SilentObserver())


def forked(study, arm, capsys):
    words = ["fork", str(run_of(study, arm).root), "--at", "2", "--json"]
    assert main([*words, "--set", "attention.implementation=baseline", "--set", CHANGE]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    (name,) = {path.name for path in (study / "forks").iterdir()} - {*ARMS}
    return found["rel_l2"], name, err


def test_a_fork_of_a_run_without_checkpoints_is_that_of_one_with_them(
    study, whole, tmp_path, capsys
):
    whole = shutil.copytree(whole, tmp_path / "whole" / "tiny")
    expected, name, said = forked(whole, "baseline", capsys)
    assert "dropped" not in said
    found, other_name, said = forked(study, "baseline", capsys)
    assert found == expected
    assert name == other_name
    assert any(value > 0 for value in found.values())
    assert "its checkpoint of step 2 was dropped by the study's keep" in " ".join(said.split())


def test_what_can_not_be_forked_is_refused_before_anything_is_trained(study, capsys):
    run = str(run_of(study, "baseline").root)
    for words, said in (
        (["fork", run, "--at", "3", "--set", CHANGE], "got 3; .* has 2, 4, 6"),
        (["fork", run, "--at", "2", "--set", "nudge.ulps=1"], "nudge must not change"),
        (["bisect", run, "--at", "2", "--set", "optimizer.lr=1"], "changes must be of the att"),
    ):
        with pytest.raises(SystemExit):
            main(words)
        assert re.search(said, capsys.readouterr().err), words
    assert not (study / "forks").exists()


def test_a_fork_that_was_planned_from_dropped_state_says_so(study):
    run = plan_fork(run_of(study, "baseline"), 2, {"precision": "bf16-mixed"})
    with pytest.raises(ValueError, match="was dropped, as the study's keep says"):
        run_fork(run, TrainOptions(wandb_mode="disabled"), SilentObserver(), isolated=False)


def test_a_bisection_of_a_run_without_checkpoints_works(study, capsys):
    run = str(run_of(study, "baseline").root)
    assert main(["bisect", run, "--at", "2", "--set", CHANGE, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)[0]
    assert first["rel_l2"] > 0


def test_a_waterfall_is_of_the_runs_last_weights_and_not_of_the_first(study, capsys):
    run = run_of(study, "flash")
    words = ["deviate", "--waterfall", "--checkpoint", str(run.root), "--layer", "1"]
    assert main([*words, "--record"]) == 0
    assert "its snapshot of step 6 was dropped" in " ".join(capsys.readouterr().err.split())
    ((_, record),) = read_waterfalls([run])
    assert record.step == 6
    # the first one's weights are there: nothing is trained for them
    shutil.rmtree(study / "forks")
    assert main([*words, "--step", "0"]) == 0
    assert not (study / "forks").exists()


def test_compare_trains_anew_on_demand_alone_and_is_exact_then(study, whole, capsys):
    runs = [str(run_of(study, arm).root) for arm in ("nudge", "baseline")]
    assert main(["compare", *runs, "--json"]) == 0
    sketched = json.loads(capsys.readouterr().out)
    assert not (study / "forks").exists()
    assert main(["compare", *runs, "--retrain", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = [str(run_of(whole, arm).root) for arm in ("nudge", "baseline")]
    assert main(["compare", *kept, "--json"]) == 0
    exact = json.loads(capsys.readouterr().out)
    assert found["drift"] == exact["drift"]
    assert found["contract"] == exact["contract"]
    assert found["a"].endswith("forks/nudge/seed-0, step 6")
    told, true = (x["drift"]["all"]["rel_l2"] for x in (sketched, exact))
    assert told == pytest.approx(true, rel=5 * sketched["by_sketch"]["relative_sd"])
    assert told > 0


def test_verify_says_what_a_sketch_proves(study, whole, capsys):
    for folder, is_dropped in ((study, True), (whole, False)):
        assert main(["verify", str(folder)]) == 0
        said = " ".join(capsys.readouterr().out.split())
        assert ("checked by sketch, rel_l2 of all weights alone" in said) == is_dropped
