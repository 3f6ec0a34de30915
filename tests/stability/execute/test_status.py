"""Where runs stand: by their records alone, and by the queue where they have jobs."""

import json
import os
import shutil
from dataclasses import replace
from datetime import datetime

import pytest

from stability.cli.main import main
from stability.execute import status as module
from stability.execute.standing import FINISH, Standing
from stability.execute.status import study_status
from stability.records.manifest import read_manifest, write_manifest
from stability.records.paths import RunPaths
from stability.records.run_lock import hold


@pytest.fixture
def disturbed(trained, tmp_path, monkeypatch):
    """A trained study of which some runs have not ended, and some have jobs."""
    folder = tmp_path / "runs" / "tiny"
    shutil.copytree(trained, folder)
    for arm, state in (("nudge", "running"), ("fp32", "running"), ("rerun", "failed")):
        paths = RunPaths.for_run(folder, arm, 1)
        manifest = read_manifest(paths.manifest)
        write_manifest(paths.manifest, replace(manifest, state=state, step=2, message="no memory"))
    shutil.rmtree(folder / "init_seed")
    job = Standing(id="17_1", state="queued", since="2026-11-26T13:00:00", reason="Dependency")
    jobs = {("init_seed", 1): job, FINISH: replace(job, id="18")}
    monkeypatch.setattr(module, "_jobs", lambda study: (jobs, ""))
    return folder


def test_every_run_has_one_state(disturbed):
    with hold(RunPaths.for_run(disturbed, "fp32", 1)):
        found = {(run.arm, run.seed): run for run in study_status(disturbed).runs}
    assert len(found) == 7 * 2 + 1
    assert found["baseline", 0].state == "finished"
    # the last loss on record is that of the weights before the sixth update
    assert (found["nudge", 1].state, found["nudge", 1].step) == ("stopped", 5)
    training = found["fp32", 1]
    assert (training.state, bool(training.node), bool(training.since)) == ("training", True, True)
    assert (found["rerun", 1].state, found["rerun", 1].message) == ("failed", "no memory")
    assert found["init_seed", 0].state == "waiting"
    assert (found["init_seed", 1].state, found["init_seed", 1].job) == ("queued", "17_1")
    assert found[FINISH].job == "18"


def test_a_run_has_ended_when_its_log_did_not_when_its_snapshots_were_dropped(disturbed):
    paths = RunPaths.for_run(disturbed, "baseline", 0)
    ended = datetime(2026, 1, 2, 3, 4, 5)
    os.utime(paths.metrics, (ended.timestamp(),) * 2)
    found = {(run.arm, run.seed): run for run in study_status(disturbed).runs}
    assert found["baseline", 0].since == ended.isoformat()
    # one that failed wrote nothing more to its log
    failed = RunPaths.for_run(disturbed, "rerun", 1)
    os.utime(failed.metrics, (ended.timestamp(),) * 2)
    found = {(run.arm, run.seed): run for run in study_status(disturbed).runs}
    assert found["rerun", 1].since > "2026-01-03"


def test_it_is_read_in_80_columns_and_as_json(disturbed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["status", str(disturbed)]) == 0
    text = capsys.readouterr().out
    assert "tiny: 9 finished" in text
    assert "of 14 runs" in text
    assert "17_1" in text
    assert "rerun, seed 1: no memory" in text
    assert "queued for: Dependency" in text
    table = text.partition("\n")[2].partition("rerun, seed 1:")[0]
    assert max(map(len, table.splitlines())) <= 80
    assert main(["status", str(disturbed), "--json"]) == 0
    (study,) = json.loads(capsys.readouterr().out)
    assert [run["state"] for run in study["runs"]].count("finished") == 9


def test_a_study_is_found_by_its_yaml_and_all_by_none(disturbed, tmp_path, capsys):
    yaml = tmp_path / "study.yaml"
    yaml.write_text("name: tiny\n")
    for words in ([str(yaml)], []):
        assert main(["status", *words, "--out", str(tmp_path / "runs")]) == 0
        assert "tiny: 9 finished" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [(["{}/none"], "must be the folder of a study or its YAML"), ([], "must hold a study, has")],
)
def test_where_nothing_has_begun_is_said(tmp_path, capsys, words, said):
    words = [word.format(tmp_path) for word in words]
    with pytest.raises(SystemExit, match="2"):
        main(["status", *words, "--out", str(tmp_path)])
    assert said in capsys.readouterr().err


def test_of_a_misspelt_study_the_nearest_is_named(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "study.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["status", str(tmp_path / "mime")])
    assert f"where no run has begun; nearest: {tmp_path / 'mine'}" in capsys.readouterr().err
