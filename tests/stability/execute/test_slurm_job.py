"""What a job does when Slurm warns it, and when its command fails."""

import os
import signal
import time

import pytest

from stability.execute.slurm_job import run_job
from stability.records.paths import RunPaths


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that runs a job whose command is `command`; it returns what it asked."""
    asked = tmp_path / "asked.txt"
    program = tmp_path / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {"JOB_ID": "20", "ARRAY_JOB_ID": "17", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    before = signal.getsignal(signal.SIGUSR2)

    def run(command, folder=tmp_path / "run"):
        monkeypatch.setattr("stability.cli.main.main", command)
        run_job(["run", "study.yaml"], str(folder))
        return asked.read_text() if asked.exists() else ""

    yield run
    signal.signal(signal.SIGUSR2, before)


def _warned(words):
    try:
        os.kill(os.getpid(), signal.SIGUSR2)
        time.sleep(5)
    except KeyboardInterrupt:
        return 130
    return 0


def test_a_job_that_is_warned_asks_for_another_turn(job):
    assert job(_warned) == "requeue 17_3\n"


def test_a_turn_too_short_for_a_checkpoint_is_the_last_one(job, monkeypatch, tmp_path):
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(time.time()) + 60))
    with pytest.raises(RuntimeError, match=r"no checkpoint was written .*--slurm\.time"):
        job(_warned)
    paths = RunPaths(tmp_path / "run")

    def saved(words):
        paths.checkpoints_dir.mkdir(parents=True)
        paths.checkpoint(5).touch()
        return _warned(words)

    assert job(saved) == "requeue 17_3\n"


def test_only_the_first_rank_asks(job, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "1")
    assert job(_warned) == ""


@pytest.mark.parametrize("code", [0, 1])
def test_a_command_that_fails_makes_the_job_a_failed_one(job, code):
    if code:
        with pytest.raises(RuntimeError, match=r"`stability run study\.yaml` ended with .* 1$"):
            job(lambda words: code)
    else:
        assert job(lambda words: code) == ""
