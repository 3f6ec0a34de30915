"""Runs as `stability run` trains them: W&B has the lines of the records, interrupted or not."""

import dataclasses

import pytest

from stability.config.load import load_study
from stability.metrics.weight_counts import WEIGHT_EDGES
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_lines
from stability.records.paths import RunPaths
from stability.study.run_study import run_study
from stability.study.train_run import TrainOptions
from stability.tracking.history import numbers_of

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

    def study_noted(self, *_: object) -> None:
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


def test_a_server_that_is_away_is_a_note_and_no_failure(study, tmp_path, monkeypatch):
    def unreachable(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr("stability.study.train_run.open_wandb_run", unreachable)
    noted = []
    observer = Interrupting("nobody")
    observer.run_noted = lambda arm, seed, text: noted.append((arm, text))
    run_study(study, tmp_path / "runs", options=OFFLINE, observer=observer, isolated=False)
    assert [arm for arm, _ in noted] == ["baseline", "fp32"]
    assert all("W&B can't be reached" in text and "no route" in text for _, text in noted)
    paths = RunPaths.for_run(tmp_path / "runs" / "tiny", "fp32", 0)
    assert read_manifest(paths.manifest).state == "finished"
