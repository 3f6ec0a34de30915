"""What a job does when Slurm warns it, and when its command fails."""

import os
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress

import pytest

from stability.execute.slurm_job import DEAF_AT_FIRST, run_job
from stability.records.paths import RunPaths


@pytest.fixture
def job(tmp_path, monkeypatch):
    """Return a function that runs a job whose command is `command`; it returns what it asked."""
    asked = tmp_path / "asked.txt"
    program = tmp_path / "scontrol"
    state = tmp_path / "state.txt"
    state.write_text("RUNNING")
    program.write_text(
        f"""#!/bin/sh
            case "$*" in
                "show job "*) echo "JobId=20 JobState=$(cat {state}) Reason=None" ;;
                "show hostnames "*) echo n3; echo n4 ;;
                "show node n3 "*) echo "NodeName=n3 NodeAddr=10.0.0.3 NodeHostName=c" ;;
                *) echo "$@" >> {asked} ;;
            esac
        """
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name, value in {"JOB_ID": "20", "ARRAY_JOB_ID": "17", "ARRAY_TASK_ID": "3"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name in ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_JOB_END_TIME"):
        monkeypatch.delenv(name, raising=False)
    before = {x: signal.getsignal(x) for x in (signal.SIGUSR2, signal.SIGTERM)}

    def run(command, folder=tmp_path / "run"):
        monkeypatch.setattr("stability.cli.main.main", command)
        run_job(["run", "study.yaml"], str(folder))
        return asked.read_text() if asked.exists() else ""

    run.state = state
    yield run
    for number, handler in before.items():
        signal.signal(number, handler)


def _warned(words, number=signal.SIGUSR2):
    try:
        os.kill(os.getpid(), number)
        time.sleep(5)
    except KeyboardInterrupt:
        return 130
    return 0


def _preempted(words):
    return _warned(words, signal.SIGTERM)


@pytest.mark.parametrize("command", [_warned, _preempted])
def test_a_job_that_is_warned_asks_for_another_turn(job, command):
    assert job(command) == "requeue 17_3\n"


def test_a_preemption_that_kills_the_training_before_the_command_asks_for_another_turn(job):
    def lost(words):
        with suppress(KeyboardInterrupt):
            _preempted(words)
        return 1

    assert job(lost) == "requeue 17_3\n"


@pytest.mark.parametrize("state", ["CANCELLED", "TIMEOUT", "PENDING"])
def test_a_job_that_was_ended_does_not_start_again(job, state):
    job.state.write_text(state)
    with pytest.raises(RuntimeError, match=f"exit code 130, in a job that Slurm has made {state}"):
        job(_preempted)


def test_a_warning_that_comes_when_the_command_has_ended_changes_nothing(job):
    assert job(lambda words: 0) == ""
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR2)


def test_a_job_does_not_die_of_a_warning_while_it_imports():
    program = "import os; os.kill(os.getpid(), 15); os.kill(os.getpid(), 12); print('alive')"
    line = f"{DEAF_AT_FIRST} {shlex.quote(sys.executable)} -c {shlex.quote(program)}"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, check=True)
    assert done.stdout == "alive\n"


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


def test_tasks_are_told_their_place_and_where_they_meet(job, monkeypatch):
    given = {"NTASKS": "4", "PROCID": "3", "LOCALID": "1", "JOB_NODELIST": "n[3-4]"}
    for name, value in given.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    told = {}
    job(lambda words: told.update(os.environ) or 0)
    place = {x: told[x] for x in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
    assert list(place.values()) == ["3", "4", "1", "10.0.0.3", "20020"]


@pytest.mark.parametrize("code", [0, 1])
def test_a_command_that_fails_makes_the_job_a_failed_one(job, code):
    if code:
        with pytest.raises(RuntimeError, match=r"`stability run study\.yaml` ended with .* 1$"):
            job(lambda words: code)
    else:
        assert job(lambda words: code) == ""
