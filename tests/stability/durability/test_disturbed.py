"""Processes that are stopped, killed or in each other's way, clocks that jump: the same bits."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stability.config.load import load_study
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from tests.conftest import run_quietly, train_edited
from tests.stability.study.recorded_bits import recorded_bits

ROOT = Path(__file__).parents[3]
ARMS = ("baseline", "rerun", "fp32")


def _edit(content):
    content["arms"] = {"rerun": {}, "fp32": {"precision": "32-true"}}
    content["seeds"] = [0]
    content["base"]["train"] |= {"steps": 30, "checkpoint_every": 7}
    content["base"]["probe"] = {"every": 0}


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text_file) -> tuple[Path, dict[str, bytes]]:
    """The study's YAML, and the bits of its undisturbed records."""
    path, folder = train_edited(tmp_path_factory.mktemp("whole"), text_file, _edit)
    return path, recorded_bits(folder)


class Command:
    """`stability run STUDY --out OUT --jobs 2` in a process of its own."""

    def __init__(self, study: Path, out: Path) -> None:
        self.out = out
        options = ("--out", out, "--wandb", "disabled", "--jobs", "2")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "stability.cli.main", "run", study, *options],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, arm: str) -> RunPaths:
        return RunPaths.for_run(self.out / "tiny", arm, 0)

    def wait_for(self, arm: str, lines: int) -> None:
        """Wait until an arm's log has so many lines."""
        log, deadline = self.run(arm).metrics, time.monotonic() + 240
        while not (log.exists() and log.read_bytes().count(b"\n") >= lines):
            assert self.process.poll() is None, self.process.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def trainers(self) -> list[int]:
        """Return the processes that hold the lock of a run open."""
        locks = {str(self.run(arm).lock.resolve()) for arm in ARMS}
        found = []
        for folder in Path("/proc").glob("[0-9]*/fd"):
            try:
                targets = {os.readlink(link) for link in folder.iterdir()}
            except OSError:  # of another account, or gone
                continue
            if targets & locks:
                found.append(int(folder.parent.name))
        return found

    def end(self) -> tuple[int, str]:
        output = self.process.communicate(timeout=300)[0]
        return self.process.returncode, output


@pytest.fixture
def command(whole, tmp_path):
    """Start the command, as often as one likes; what is left of it in the end is killed."""
    started: list[Command] = []

    def start() -> Command:
        started.append(Command(whole[0], tmp_path / "runs"))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.communicate()


def _with_two_in_training(command) -> Command:
    running = command()
    running.wait_for("rerun", 20)
    running.wait_for("fp32", 5)
    return running


def _check_bits(whole, out: Path) -> None:
    assert recorded_bits(out / "tiny") == whole[1]


@pytest.mark.long
@pytest.mark.parametrize(
    "who", ["both", *(pytest.param(x, marks=pytest.mark.long) for x in ("the run", "the command"))]
)
def test_a_process_that_is_stopped_for_a_while_goes_on_to_the_same_bits(whole, command, who):
    running = command()
    running.wait_for("baseline", 20)
    trainers = running.trainers()
    assert len(trainers) == 1
    stopped = {"the run": trainers, "the command": [], "both": trainers}[who]
    stopped = stopped + ([] if who == "the run" else [running.process.pid])
    for process in stopped:
        os.kill(process, signal.SIGSTOP)
    time.sleep(3)
    if trainers[0] in stopped:
        size = running.run("baseline").metrics.stat().st_size
        time.sleep(0.5)
        assert running.run("baseline").metrics.stat().st_size == size
    for process in stopped:
        os.kill(process, signal.SIGCONT)
    assert running.end()[0] == 0
    _check_bits(whole, running.out)


@pytest.mark.long
def test_a_killed_run_beside_another_is_told_and_trained_by_the_next_command(whole, command):
    running = _with_two_in_training(command)
    os.kill(running.trainers()[0], signal.SIGKILL)
    code, output = running.end()
    assert code == 1
    assert "killed by signal 9" in " ".join(output.split())
    states = [read_manifest(running.run(arm).manifest).state for arm in ARMS]
    assert sorted(states) == ["finished", "finished", "running"]
    assert command().end()[0] == 0
    _check_bits(whole, running.out)


@pytest.mark.long
@pytest.mark.slow
def test_a_killed_command_takes_its_runs_along_and_the_next_goes_on(whole, command):
    running = _with_two_in_training(command)
    running.process.kill()
    running.process.wait()
    again = command()
    assert again.end()[0] == 0
    _check_bits(whole, running.out)


@pytest.mark.long
def test_of_two_commands_on_one_study_each_run_is_trained_by_one(whole, command):
    first = command()
    first.wait_for("baseline", 5)
    second = command()
    ends = [first.end(), second.end()]
    assert ends[0][0] == 0, ends[0][1]
    assert ends[1][0] in (0, 1), ends[1][1]
    assert "Traceback" not in ends[0][1] + ends[1][1]
    _check_bits(whole, first.out)
    assert command().end()[0] == 0
    _check_bits(whole, first.out)


def _edit_short(content):
    content |= {"arms": {"rerun": {}}, "seeds": [0], "yardstick": "", "early_step": 1}
    content["base"]["train"] |= {"steps": 2, "snapshot_steps": [1], "checkpoint_every": 1}
    content["base"]["probe"] = {"every": 0}


@pytest.mark.slow
def test_a_clock_that_jumps_back_and_ahead_changes_no_bit(write_study, tmp_path, monkeypatch):
    # no part of a run asks for the time of day today: none may come to choose by it
    study, clock, asked = load_study(write_study(_edit_short)), time.time, [0]
    run_quietly(study, tmp_path / "whole")

    def jumping():
        asked[0] += 1
        return clock() + (-86400, 86400, 0)[asked[0] % 3]

    monkeypatch.setattr(time, "time", jumping)
    monkeypatch.setattr(time, "time_ns", lambda: int(jumping() * 1e9))
    ended = run_quietly(study, tmp_path / "runs").ended
    assert {state for *_, state, _ in ended} == {"finished"}, ended
    assert recorded_bits(tmp_path / "runs") == recorded_bits(tmp_path / "whole")
