"""What a job of Slurm executes: the command line of one run, and another turn if time is up.

submitit calls `run_job` by its name in each task of a job. Slurm warns it by SIGUSR2 before the
time limit, and before a preemption on many clusters: the run is stopped as by Ctrl-C, and the job
asks for a place in the queue again. A run goes on from its last checkpoint, to the same bits.
Leaves out jobs that Slurm requeues by itself, as after the failure of a node: those need nothing.
"""

import importlib
import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stability.records.paths import RunPaths, checkpoint_steps

__all__ = ["run_job"]

IDLE_TURNS = 3
"""How many turns in which no checkpoint was written may be followed by another one."""


class _Warning:
    """Whether Slurm has warned this process."""

    def __init__(self) -> None:
        self.has_come = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt


def run_job(words: Sequence[str], run: str = "") -> None:
    """Run `stability` with these words; `run` is the folder of the run that they train.

    RuntimeError, which makes the job a failed one, if that fails.
    """
    warning, before = _Warning(), _last_checkpoint(run)
    _tell_ranks()
    # by name, in a process of its own: the command line stands above this room
    code = importlib.import_module("stability.cli.main").main(list(words))
    if warning.has_come and code:
        _ask_for_another_turn(is_idle=_last_checkpoint(run) <= before)
    elif code:
        raise RuntimeError(f"`stability {shlex.join(words)}` ended with exit code {code}")


def _last_checkpoint(run: str) -> int:
    return max(checkpoint_steps(RunPaths(Path(run))), default=0) if run else 0


def _ask_for_another_turn(*, is_idle: bool) -> None:
    """Put this job back into the queue; RuntimeError if that would never end."""
    turns = int(os.environ.get("SLURM_RESTART_COUNT") or 0) + 1
    if is_idle and turns > IDLE_TURNS:
        raise RuntimeError(
            f"time was up in turn {turns}, and no checkpoint was written in it; give the job more "
            "time (--slurm.time), or lower train.checkpoint_every"
        )
    if os.environ.get("SLURM_PROCID", "0") == "0":
        subprocess.run(["scontrol", "requeue", _own_id()], check=True, timeout=60)


def _own_id() -> str:
    of_array, task = (os.environ.get(f"SLURM_ARRAY_{x}") for x in ("JOB_ID", "TASK_ID"))
    return f"{of_array}_{task}" if of_array else os.environ["SLURM_JOB_ID"]


def _tell_ranks() -> None:
    """Tell torch.distributed of this job's other tasks, as torchrun would; nothing if alone."""
    if int(os.environ.get("SLURM_NTASKS") or 1) > 1:
        submitit = importlib.import_module("submitit.helpers")  # optional
        submitit.TorchDistributedEnvironment().export(overwrite=False)
