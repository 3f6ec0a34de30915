"""Runs as `stability run` trains them: W&B has the lines of the records, interrupted or not."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from wandb.sdk.mailbox import HandleAbandonedError

from stability.config.load import load_study
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_lines
from stability.records.paths import RunPaths, StudyPaths
from stability.study.run_study import run_study
from stability.study.train_run import TrainOptions
from stability.tracking.history import WandbRun, numbers_of

ROOT = Path(__file__).parents[3]
OFFLINE = TrainOptions(wandb_mode="offline")


class Interrupting:
    """Interrupts the run of an arm once, when it has made five updates."""

    def __init__(self, arm: str) -> None:
        self._arm = arm
        self.interrupted = False

    def run_started(self, *_: object) -> None:
        pass

    def run_advanced(self, arm: str, seed: int, step: int, loss: float) -> None:
        if arm == self._arm and step == 5 and not self.interrupted:
            self.interrupted = True
            raise KeyboardInterrupt

    def run_noted(self, *_: object) -> None:
        pass

    def wandb_failed(self, *_: object) -> None:
        pass

    def study_noted(self, *_: object) -> None:
        pass

    def assays_planned(self, *_: object) -> None:
        pass

    def assay_advanced(self, *_: object) -> None:
        pass

    def run_ended(self, *_: object) -> None:
        pass


@pytest.fixture
def study(write_study):
    def two_arms(content: dict) -> None:
        content.update(arms={"baseline": {}, "fp32": {"precision": "32-true"}}, seeds=[0])
        content["base"]["watch"] = {"every": 2}

    return load_study(write_study(two_arms), None)


@pytest.fixture
def gone_on(study, tmp_path, monkeypatch) -> RunPaths:
    """A run that was interrupted after its checkpoint at step 4, and went on."""
    for name in ("WANDB_NAME", "WANDB_RUN_ID", "WANDB_RUN_GROUP"):
        monkeypatch.setenv(name, "theirs")
    observer = Interrupting("fp32")
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path / "runs", options=OFFLINE, observer=observer, isolated=False)
    run_study(study, tmp_path / "runs", options=OFFLINE, observer=observer, isolated=False)
    return RunPaths.for_run(tmp_path / "runs" / "tiny", "fp32", 0)


def _expected(paths: RunPaths) -> list[dict]:
    """What W&B is to have: the lines of the records with numbers or counts."""
    rows = []
    for _, line in read_lines(paths.metrics):
        counts = {name: value for name, value in line.items() if isinstance(value, list)}
        row = {**numbers_of(line), **{f"{n}.values": v for n, v in counts.items()}}
        if row and "event" not in line:
            rows.append({**row, "trainer/global_step": line["step"]})
    return rows


def _without_bins(row: dict) -> dict:
    return {name: v for name, v in row.items() if not name.endswith(("._type", ".bins"))}


@pytest.mark.slow
def test_a_run_that_went_on_is_on_w_and_b_as_in_the_records(gone_on, offline_log, read_rows):
    rows = read_rows(offline_log(gone_on.wandb_dir))
    assert [_without_bins(row) for row in rows] == _expected(gone_on)
    steps = [row["trainer/global_step"] for row in rows if "train/loss" in row]
    assert steps == [0, 1, 2, 3, 4, 5], "each once"
    weights = [row for row in rows if "weights/all/histogram.values" in row]
    assert [row["trainer/global_step"] for row in weights] == [0, 1, 2, 4, 6]
    assert weights[0]["weights/all/histogram.bins"][1:-1] == list(WEIGHT_EDGES)


@pytest.mark.slow
def test_neither_w_and_b_nor_its_variables_change_a_bit(gone_on, study, tmp_path, run_tiny):
    run_tiny(dataclasses.replace(study, name="unwatched"), tmp_path / "runs")
    plain = RunPaths.for_run(tmp_path / "runs" / "unwatched", "fp32", 0)
    hashes = [read_manifest(paths.manifest).hashes for paths in (gone_on, plain)]
    assert hashes[0]["final_weights"] == hashes[1]["final_weights"]
    assert gone_on.metrics.read_bytes() == plain.metrics.read_bytes()


@pytest.mark.slow
def test_runs_that_are_jobs_of_their_own_are_on_w_and_b_as_in_the_records(
    write_study, tmp_path, offline_log, read_rows, read_summary
):
    def one_candidate(content: dict) -> None:
        flash, fp32 = {"attention": {"implementation": "flash"}}, {"precision": "32-true"}
        content |= {"seeds": [0], "arms": {"baseline": {}, "flash": flash, "fp32": fp32}}

    path, out = str(write_study(one_candidate)), tmp_path / "runs"
    jobs = [["--only", arm, "--seed", "0"] for arm in ("baseline", "flash", "fp32")]
    for words in (*jobs, ["--finish"]):  # as an executor starts them
        done = subprocess.run(
            [sys.executable, "-m", "stability.cli.main", "run", path, "--out", out, *words],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert "W&B" not in done.stdout
    paths = RunPaths.for_run(out / "tiny", "flash", 0)
    rows = read_rows(offline_log(paths.wandb_dir))
    assert [_without_bins(row) for row in rows] == _expected(paths)
    assert read_summary(offline_log(paths.wandb_dir))["verdict"] == "INCONCLUSIVE"
    study = read_summary(offline_log(StudyPaths(out / "tiny").wandb_dir))
    assert study["verdict/flash"] == "INCONCLUSIVE"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (HandleAbandonedError(), "its service has ended"),
        pytest.param(RuntimeError("no\nroute"), "RuntimeError: no route", marks=pytest.mark.slow),
    ],
)
def test_a_server_that_is_away_is_one_note_and_no_failure(
    study, tmp_path, monkeypatch, error, said
):
    first = "baseline"
    """Each try waits for its time limit: after the first that fails there is none."""
    tried = []

    def unreachable(**given: str) -> None:
        tried.append(given["job_type"])
        raise error

    monkeypatch.setattr("wandb.init", unreachable)
    noted = []
    observer = Interrupting("nobody")
    observer.wandb_failed = lambda arm, seed, text: noted.append((arm, text))
    offline = TrainOptions(wandb_mode="offline")
    run_study(study, tmp_path / "runs", options=offline, observer=observer, isolated=False)
    away = (
        "W&B can't be reached, and gets this run and those that start later once the study has "
        "ended: "
    )
    assert noted == [(first, f"{away}{said}")]
    assert tried == [first]
    paths = RunPaths.for_run(tmp_path / "runs" / "tiny", "fp32", 0)
    assert read_manifest(paths.manifest).state == "finished"


def _end_service(monkeypatch, lost: list[WandbRun]) -> None:
    """Let W&B's service end while the run of `fp32` trains, as where the system kills it."""
    send = WandbRun._send

    def failing(run: WandbRun, line: dict) -> None:
        if run.run.job_type == "fp32" and line["step"] == 3:
            lost.append(run)
            raise ConnectionResetError("Connection lost")
        send(run, line)

    monkeypatch.setattr(WandbRun, "_send", failing)


def _end_server(monkeypatch, lost: list[WandbRun]) -> None:
    """Let W&B's server take too long at the end of the run of `fp32`."""
    close = WandbRun.close

    def failing(run: WandbRun, *, failed: bool) -> None:
        if run.run.job_type == "fp32":
            lost.append(run)
            raise TimeoutError("Timed out finishing run.")
        close(run, failed=failed)

    monkeypatch.setattr(WandbRun, "close", failing)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "said"),
    [(_end_service, "its service has ended"), (_end_server, "Timed out finishing run.")],
)
def test_w_and_b_lost_while_a_run_trains_is_a_note_and_no_failure(
    study, tmp_path, monkeypatch, end, said
):
    lost, noted = [], []
    end(monkeypatch, lost)
    observer = Interrupting("nobody")
    observer.run_noted = lambda arm, seed, text: noted.append((arm, text))
    run_study(study, tmp_path / "runs", options=OFFLINE, observer=observer, isolated=False)
    (run,) = lost
    run.run.finish()
    assert noted == [("fp32", f"W&B lost the run, and gets it once the study has ended: {said}")]
    paths = RunPaths.for_run(tmp_path / "runs" / "tiny", "fp32", 0)
    assert read_manifest(paths.manifest).state == "finished"
    lines = [line for _, line in read_lines(paths.metrics)]
    assert [line["step"] for line in lines if "train/loss" in line] == [0, 1, 2, 3, 4, 5]
