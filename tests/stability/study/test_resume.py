"""Killed, interrupted or repeated: a study goes on to the same bits, and nothing is overwritten."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.metric_log import read_metrics
from stability.records.paths import RunPaths
from stability.study.run import RunConflictError, check_existing
from stability.study.run_study import plan_study
from tests.stability.study.recorded_bits import recorded_bits

ROOT = Path(__file__).parents[3]
KEPT = ("baseline", "fp32")


def _short(content):
    content["arms"] = {arm: content["arms"][arm] for arm in KEPT}
    content["seeds"] = [0]
    content["base"]["train"]["steps"] = 100
    content["base"]["train"]["checkpoint_every"] = 7


def _start(study: Path, out: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "stability.cli.main", "run", str(study), "--out", str(out)]
    return subprocess.Popen(
        [*command, "--wandb", "disabled"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # a test run in the background has SIGINT ignored, and hands that on
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def _wait_for_lines(path: Path, lines: int, process: subprocess.Popen) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_bytes().count(b"\n") >= lines:
            return
        time.sleep(0.005)
    raise AssertionError(
        f"ended with {process.poll()} before line {lines}: {process.stdout.read()}"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arm", "lines", "how"),
    [
        ("baseline", 10, signal.SIGKILL),
        ("baseline", 70, signal.SIGKILL),
        ("fp32", 90, signal.SIGINT),
    ],
    ids=["killed-before-a-checkpoint", "killed-after-one", "interrupted-in-a-candidate"],
)
def test_a_stopped_study_goes_on_to_the_same_bits(write_study, run_tiny, tmp_path, arm, lines, how):
    path = write_study(_short)
    process = _start(path, tmp_path / "stopped")
    run = RunPaths.for_run(tmp_path / "stopped" / "tiny", arm, 0)
    _wait_for_lines(run.metrics, lines, process)
    process.send_signal(how)
    output = process.communicate(timeout=60)[0]
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL), output
    manifest = read_manifest(run.manifest)
    assert manifest.state == ("interrupted" if how == signal.SIGINT else "running")
    assert len(read_metrics(run.metrics)["train/loss"].steps) < 100

    study = load_study(path, None)
    ended = run_tiny(study, tmp_path / "stopped").ended
    assert [(state, message) for _, _, state, message in ended][-1] == ("finished", ""), ended
    run_tiny(study, tmp_path / "whole")
    assert recorded_bits(tmp_path / "stopped" / "tiny") == recorded_bits(
        tmp_path / "whole" / "tiny"
    )


def test_an_interrupt_within_a_checkpoint_is_an_interrupt(
    write_study, run_tiny, tmp_path, monkeypatch
):
    def interrupted(*arguments):
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("unexpected pos")  # as torch's zip writer on its way out

    study = load_study(write_study(_short), {"train.steps": "8"})
    with monkeypatch.context() as patch:
        patch.setattr("stability.study.checkpoints.torch.save", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run_tiny(study, tmp_path)
    run = RunPaths.for_run(tmp_path / "tiny", "baseline", 0)
    assert read_manifest(run.manifest).state == "interrupted"
    assert {ended[2] for ended in run_tiny(study, tmp_path).ended} == {"finished"}


def test_a_finished_study_is_not_trained_again(write_study, run_tiny, tmp_path):
    study = load_study(write_study(_short), {"train.steps": "3"})
    run_tiny(study, tmp_path / "runs")
    files = {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*/seed-0/*")}
    ended = run_tiny(study, tmp_path / "runs").ended
    assert [(state, message) for _, _, state, message in ended] == [("finished", "kept")] * 2
    assert files == {p: p.stat().st_mtime_ns for p in (tmp_path / "runs").rglob("*/seed-0/*")}


def test_a_directory_with_another_run_is_refused_and_untouched(write_study, run_tiny, tmp_path):
    path = write_study(_short)
    run_tiny(load_study(path, {"train.steps": "3"}), tmp_path / "runs")
    before = recorded_bits(tmp_path / "runs" / "tiny")
    with pytest.raises(RunConflictError, match=r"config.train.steps = 3, asked for 4; use --out"):
        run_tiny(load_study(path, {"train.steps": "4"}), tmp_path / "runs")
    assert recorded_bits(tmp_path / "runs" / "tiny") == before


def test_a_directory_that_is_no_run_is_refused(write_study, run_tiny, tmp_path):
    stranger = tmp_path / "runs" / "tiny" / "baseline" / "seed-0" / "thesis.txt"
    stranger.parent.mkdir(parents=True)
    (stranger.parent / ".manifest.json.ab12.tmp").write_text("half")  # what a kill may leave
    check_existing(plan_study(load_study(write_study(_short), None), tmp_path / "runs")[0])
    stranger.write_text("years of work")
    with pytest.raises(RunConflictError, match="holds files but no manifest"):
        run_tiny(load_study(write_study(_short), None), tmp_path / "runs")
    assert stranger.read_text() == "years of work"
