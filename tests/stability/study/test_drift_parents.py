"""A drift is shown only while both snapshots that it was computed from are the runs' own."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from stability.analysis.study_records import read_study
from stability.cli.main import main
from stability.config.load import load_study
from stability.model import lightning_module
from stability.records import identity
from stability.records.manifest import read_manifest, write_manifest
from stability.records.metric_names import DRIFT_FROM, DRIFT_OF
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import file_checksum, read_sealed, write_sealed
from stability.report.page.html import write_page
from stability.study import settle
from stability.study.fork import fork_drifts, plan_fork, run_fork
from stability.study.run import RunConflictError
from stability.study.train_run import TrainOptions
from tests.conftest import SilentObserver, run_quietly, train_edited
from tests.stability.sealing import seal


def small(content):
    content["arms"] = {
        "baseline": {},
        "nudge": {"nudge": {"ulps": 1}},
        "fp32": {"precision": "32-true"},
    }
    content |= {"seeds": [0], "early_step": 1}
    content["base"]["train"] |= {"steps": 4, "snapshot_steps": [1]}
    content["base"]["probe"] = {"every": 0}


@pytest.fixture(scope="module")
def sample(tmp_path_factory, text_file):
    """The YAML and the folder of a trained study; tests only read them."""
    return train_edited(tmp_path_factory.mktemp("small"), text_file, small)


@pytest.fixture
def copied(sample, tmp_path):
    """The YAML of a study, and a copy of its folder that a test may spoil."""
    path, folder = sample
    return path, shutil.copytree(folder, tmp_path / "runs" / "tiny")


def retrain_baseline(path, folder, monkeypatch):
    """Train the baseline anew at another learning rate, by code that no identity covers."""
    rate = lightning_module.learning_rate_factor
    shutil.rmtree(folder / "baseline")
    monkeypatch.setattr(lightning_module, "learning_rate_factor", lambda *a: 3 * rate(*a))
    run_quietly(load_study(path), folder.parent)


def drifts(folder, arm="nudge"):
    return read_study(folder).arm(arm).runs[0].drift("rel_l2")


def compared(folder, arm, capsys):
    capsys.readouterr()
    runs = [str(folder / name / "seed-0") for name in (arm, "baseline")]
    assert main(["compare", *runs, "--json"]) == 0
    return json.loads(capsys.readouterr().out)["drift"]["all"]["rel_l2"]


@pytest.mark.slow
def test_a_retrained_baseline_gives_the_drift_from_its_own_weights(copied, monkeypatch, capsys):
    path, folder = copied
    before = drifts(folder)
    retrain_baseline(path, folder, monkeypatch)
    now = compared(folder, "nudge", capsys)
    assert now > 100 * before[4]
    assert drifts(folder)[4] == now


def test_swapped_folders_show_no_drift_and_are_named(copied, capsys):
    _, folder = copied
    (folder / "nudge").rename(folder / "other")
    (folder / "fp32").rename(folder / "nudge")
    (folder / "other").rename(folder / "fp32")
    assert drifts(folder, "nudge") == drifts(folder, "fp32") == {}
    assert main(["verify", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "records belong to arm fp32, seed 0" in said
    assert "0 of 2 planned pairs" in said


def test_a_pair_without_a_manifest_is_counted(copied, capsys):
    _, folder = copied
    RunPaths.for_run(folder, "fp32", 0).manifest.unlink()
    assert main(["verify", str(folder)]) == 1
    assert "1 of 2 planned pairs" in capsys.readouterr().out
    assert drifts(folder, "fp32") == {}


@pytest.mark.slow
def test_stale_drifts_are_named_and_left_out_until_they_are_computed_anew(
    copied, monkeypatch, capsys
):
    path, folder = copied
    monkeypatch.setattr(settle, "remake_drifts", lambda *_: [])  # killed before it came to that
    retrain_baseline(path, folder, monkeypatch)
    assert drifts(folder) == {0: drifts(folder)[0]}, "the initial weights are the same bits again"
    assert main(["show", str(folder)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    stale = (
        "Stale, and left out: drifts of nudge, seed 0, at step 1, 4 (at step 1: computed from a "
        "snapshot"
    )
    assert stale in shown
    assert main(["show", str(folder), "nudge"]) == 0
    assert stale in " ".join(capsys.readouterr().out.split())
    assert stale in " ".join(write_page(read_study(folder), folder).read_text().split())
    assert main(["verify", str(folder)]) == 1
    said = capsys.readouterr().out
    assert "0 of 2 planned pairs keep the contract; 2 stale" in said


def verified_pair(folder, arm, capsys, *options):
    """Return the exit code of `verify` of the baseline and an arm, and what it says of drifts."""
    capsys.readouterr()
    runs = [str(folder / name / "seed-0") for name in ("baseline", arm)]
    code = main(["verify", *runs, *options])
    said = capsys.readouterr().out
    return code, said.splitlines()[-1]


@pytest.mark.slow
def test_two_runs_are_verified_with_their_drifts(copied, monkeypatch, capsys):
    path, folder = copied
    holding = "drifts: hold: all come from the snapshots on disk; "
    once, every = (
        f"{holding}{n} computed anew from snapshots, as on record" for n in ("1 drift", "3 drifts")
    )
    assert verified_pair(folder, "nudge", capsys) == (0, once)
    assert verified_pair(folder, "nudge", capsys, "--all") == (0, every)
    code, said = verified_pair(folder, "baseline", capsys)
    assert (code, said.startswith("drifts: not looked at: those on record of baseline")) == (
        0,
        True,
    )
    monkeypatch.setattr(settle, "remake_drifts", lambda *_: [])
    retrain_baseline(path, folder, monkeypatch)
    code, said = verified_pair(folder, "nudge", capsys)
    assert code == 1
    assert said.startswith("drifts: stale: drift at step 1: computed from a snapshot")
    assert main(["verify", *(str(folder / a / "seed-0") for a in ("nudge", "fp32"))]) == 1


def test_a_drift_of_two_runs_that_is_another_on_record_is_told(copied, capsys):
    _, folder = copied
    run = RunPaths.for_run(folder, "nudge", 0)

    def raise_drift(line):
        name = "drift/all/rel_l2"
        return {**line, name: 2 * line[name]} if line.get(name) else line

    rewrite_log(run, raise_drift)
    code, said = verified_pair(folder, "nudge", capsys, "--all")
    assert code == 1
    assert "drifts: damaged: drift/all/rel_l2 at step 0 is " in said


def test_a_baseline_of_other_sources_is_no_pair_with_the_candidates_that_were_kept(copied, capsys):
    _, folder = copied
    runs = read_study(folder).arm("baseline").runs
    manifest = read_manifest(runs[0].paths.manifest)
    other = {**manifest.environment, "package_source": "f" * 64}
    write_manifest(runs[0].paths.manifest, replace(manifest, environment=other))
    run = read_study(folder).arm("nudge").runs[0]
    assert (run.state, dict(run.metrics)) == ("failed", {})
    assert "no pair: environment.package_source must be the baseline's 'ffff" in run.message
    assert main(["verify", str(folder)]) == 1
    assert "0 of 2 planned pairs keep the contract; 2 no pair" in capsys.readouterr().out


def test_an_arm_that_only_the_sealed_protocol_planned_is_counted(copied, capsys):
    _, folder = copied
    content = read_sealed(StudyPaths(folder).study, "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "fp32"]
    write_sealed(StudyPaths(folder).study, content)
    assert main(["verify", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 planned pairs keep the contract; 1 missing" in said
    assert "the sealed protocol planned it, the study has it no more" in said


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_without_its_sealed_plan_no_study_is_said_to_be_complete(copied, capsys, damage):
    _, folder = copied
    content = read_sealed(StudyPaths(folder).study, "")
    content["arms"] = [arm for arm in content["arms"] if arm["name"] != "fp32"]
    write_sealed(StudyPaths(folder).study, content)
    damage(StudyPaths(folder).protocol)
    assert main(["verify", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 1 planned pairs keep the contract" in said
    assert "planned pairs that study.json leaves out are not counted" in said
    assert "protocol.json" in said


def rewrite_log(paths, edit):
    """Change the lines of a log, with every checksum made anew, as a careful liar would."""
    lines = [json.loads(line) for line in paths.metrics.read_text().splitlines()]
    paths.metrics.write_text("".join(seal(edit(line)) for line in lines))
    manifest = read_manifest(paths.manifest)
    files = {**manifest.files, "metrics.jsonl": file_checksum(paths.metrics)}
    write_manifest(paths.manifest, replace(manifest, files=files))


def without_parents(line):
    return {key: value for key, value in line.items() if key not in (DRIFT_OF, DRIFT_FROM)}


@pytest.mark.slow
def test_drifts_of_an_older_version_are_shown_as_unproven(copied, capsys):
    path, folder = copied
    before = drifts(folder)
    rewrite_log(RunPaths.for_run(folder, "nudge", 0), without_parents)
    assert drifts(folder) == before
    assert main(["show", str(folder)]) == 0
    assert "Unproven: the drifts of nudge do not say" in " ".join(capsys.readouterr().out.split())
    assert main(["verify", str(folder)]) == 1
    assert "1 of 2 planned pairs keep the contract; 1 unproven" in capsys.readouterr().out
    assert main(["verify", str(folder), "--all"]) == 0
    assert "6 drifts computed anew" in capsys.readouterr().out
    run_quietly(load_study(path), folder.parent)
    assert read_study(folder).arm("nudge").runs[0].unproven == ()
    assert drifts(folder) == before


def test_a_drift_that_its_snapshots_do_not_have_is_found(copied, capsys):
    _, folder = copied

    def lie(line):
        return {**line, "drift/all/rel_l2": 1e-9} if "drift/all/rel_l2" in line else line

    rewrite_log(RunPaths.for_run(folder, "nudge", 0), lie)
    assert main(["verify", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["planned"], found["hold"]) == (2, 1)
    (pair,) = [pair for pair in found["pairs"] if pair["arm"] == "nudge"]
    assert pair["state"] == "damaged"
    assert "drift/all/rel_l2" in pair["said"]
    assert "is 1e-09 on record" in pair["said"]


def test_the_log_of_another_arm_gives_no_drift(copied):
    _, folder = copied
    logs = [RunPaths.for_run(folder, arm, 0).metrics for arm in ("nudge", "fp32")]
    shutil.copy(logs[1], logs[0])
    rewrite_log(RunPaths.for_run(folder, "nudge", 0), lambda line: line)
    run = read_study(folder).arm("nudge").runs[0]
    assert run.drift("rel_l2") == {}
    assert "computed from a snapshot" in run.stale[4]


@pytest.mark.parametrize("state", ["running", "failed"])
def test_a_pair_that_has_not_ended_is_missing(copied, capsys, state):
    _, folder = copied
    paths = RunPaths.for_run(folder, "fp32", 0)
    write_manifest(paths.manifest, replace(read_manifest(paths.manifest), state=state, step=3))
    assert main(["verify", str(folder)]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "1 of 2 planned pairs keep the contract; 1 missing" in said


def test_a_run_that_says_finished_short_of_its_plan_is_missing(copied, capsys):
    _, folder = copied
    paths = RunPaths.for_run(folder, "fp32", 0)
    write_manifest(paths.manifest, replace(read_manifest(paths.manifest), step=1))
    assert main(["verify", str(folder)]) == 1
    assert "finished at step 1 of 4" in " ".join(capsys.readouterr().out.split())


def test_a_candidate_is_not_kept_beside_a_baseline_of_other_code(copied, monkeypatch):
    path, folder = copied
    shutil.rmtree(folder / "baseline")
    monkeypatch.setattr(identity, "hash_sources", lambda *_: "f" * 64)
    with pytest.raises(RunConflictError, match=r"nudge.*source = .*baseline would be with 'ffff"):
        run_quietly(load_study(path), folder.parent)
    assert not (folder / "baseline").exists(), "nothing was trained"


def test_a_candidate_is_not_kept_beside_a_baseline_that_is_there_and_no_pair(copied):
    path, folder = copied
    manifest = read_manifest(RunPaths.for_run(folder, "baseline", 0).manifest)
    other = {**manifest.environment, "package_source": "f" * 64}
    changed = replace(manifest, environment=other)
    write_manifest(RunPaths.for_run(folder, "baseline", 0).manifest, changed)
    with pytest.raises(RunConflictError, match=r"no pair: environment\.package_source"):
        run_quietly(load_study(path), folder.parent)


@pytest.mark.slow
def test_a_kept_fork_of_a_baseline_that_was_trained_anew_gives_no_drift(copied, monkeypatch):
    path, folder = copied
    parent = RunPaths.for_run(folder, "baseline", 0)
    fork = plan_fork(parent, 2, {"precision": "32-true"})
    run_fork(fork, TrainOptions(wandb_mode="disabled"), SilentObserver(), isolated=False)
    assert 0 < fork_drifts(fork)[4] < 1
    retrain_baseline(path, folder, monkeypatch)
    with pytest.raises(ValueError, match=r"is no fork of .* as it is now: drift at step 4: comp"):
        fork_drifts(fork)
