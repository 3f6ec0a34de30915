"""A study of eight runs, and the same study trained by processes of this machine."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stability.execute.status import RunStatus, study_status
from tests.conftest import TINY_ARMS, write_tiny

ROOT = Path(__file__).parents[2]
PROGRAM = [sys.executable, "-m", "stability.cli.main"]
ARMS = ("baseline", "nudge", "ranks", "fp32")
OF_ARMS = TINY_ARMS | {"ranks": {"parallel": {"data": 2}}}
STEPS, SAVED_EVERY = 90, 5
PATIENCE_S = 900
"""For a machine that is busy with other things."""


def variables() -> dict[str, str]:
    """Of a process that trains: this checkout, and the threads of all runs alike."""
    path = f"{ROOT}:{ROOT / 'kernels'}:{os.environ.get('PYTHONPATH', '')}".rstrip(":")
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}


def _obey_ctrl_c() -> None:
    """Undo what a shell does to programs that it starts in the background."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Command:
    """`stability run` on the study, in a process of its own."""

    def __init__(self, study: Path, *words: str, env: Mapping[str, str] | None = None) -> None:
        self.env = dict(env or variables())
        self.study, self.out = study, study.parent / "runs"
        self.log = study.parent / "command.log"
        line = [*PROGRAM, "run", str(study), "--out", str(self.out), "--wandb", "disabled", *words]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(
                line, env=self.env, stdout=log, stderr=log, preexec_fn=_obey_ctrl_c
            )

    @property
    def folder(self) -> Path:
        return self.out / "tiny"

    def ended(self) -> int:
        """Wait for its end; return its exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        finally:
            self.process.kill()
            self.process.wait()

    def interrupt(self) -> int:
        self.process.send_signal(signal.SIGINT)
        return self.ended()

    def until(self, what: Callable[[dict[tuple[str, int], RunStatus]], Any]) -> Any:
        """Wait until `what`, given the status of each run, is true; return it."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end:
            found = what(self.status())
            if found:
                return found
            time.sleep(0.2)
        self.process.kill()
        self.process.wait()
        raise TimeoutError(f"{self.status()}\n{self.log.read_text()}")

    def status(self) -> dict[tuple[str, int], RunStatus]:
        if not (self.folder / "study.json").exists():
            return {}
        return {(run.arm, run.seed): run for run in study_status(self.folder).runs}


def is_under_way(run: RunStatus) -> bool:
    """Whether a run trains, has a checkpoint, and is far from its end."""
    return run.state == "training" and SAVED_EVERY < run.step < STEPS * 2 // 3


@pytest.fixture(scope="session")
def write_long(tmp_path_factory, text_file) -> Callable[..., Path]:
    """Return a function that writes the study, or a part of it, long enough to be disturbed."""

    def write(seeds: tuple[int, ...] = (0, 1), arms: tuple[str, ...] = ARMS) -> Path:
        def edit(content: dict) -> None:
            content["arms"] = {name: OF_ARMS[name] for name in arms}
            content["yardstick"] = arms[-1]
            content["seeds"] = list(seeds)
            content["base"]["probe"] = {"every": 0}
            content["base"]["train"] |= {"steps": STEPS, "checkpoint_every": SAVED_EVERY}

        return write_tiny(tmp_path_factory.mktemp("study"), text_file, edit)

    return write


@pytest.fixture(scope="session")
def trained_here(write_long) -> Path:
    """The folder of the study, trained by processes of this machine."""
    command = Command(write_long(), "--jobs", "2")
    assert command.ended() == 0, command.log.read_text()
    return command.folder
