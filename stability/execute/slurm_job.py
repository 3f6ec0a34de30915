"""What a job of Slurm executes: the command line of one run, and another turn if time is up.

submitit calls `run_job` by its name in each task of a job. Slurm warns it by SIGUSR2 before the
time limit, and before a preemption on many clusters: the run is stopped as by Ctrl-C, and the job
asks for a place in the queue again. A run goes on from its last checkpoint, to the same bits.
Leaves out jobs that Slurm requeues by itself, as after the failure of a node: those need nothing.
"""

import importlib
import math
import os
import shlex
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from stability.records.paths import RunPaths, checkpoint_steps

__all__ = ["run_job"]

WARNING_S = 90
"""How long before the end Slurm warns a job, unless it is told otherwise."""
SLACK_S = 60
"""Slurm warns up to a minute earlier than it was asked to: sbatch(1), --signal."""


class _Warning:
    """Whether Slurm has warned this process."""

    def __init__(self) -> None:
        self.has_come = False
        signal.signal(signal.SIGUSR2, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self.has_come:
            self.has_come = True
            raise KeyboardInterrupt


def run_job(words: Sequence[str], run: str = "", warning_s: int = WARNING_S) -> None:
    """Run `stability` with these words; `run` is the folder of the run that they train.

    `warning_s` says how long before its end the job is warned. RuntimeError, which makes the job a
    failed one, if the command fails, or if time is up and no checkpoint was written in this turn.
    """
    warning, before = _Warning(), _last_checkpoint(run)
    _tell_ranks()
    # by name, in a process of its own: the command line stands above this room
    code = importlib.import_module("stability.cli.main").main(list(words))
    if warning.has_come and code:
        if _last_checkpoint(run) <= before and _seconds_left() < warning_s + SLACK_S:
            # another turn would get no further; a preemption, which comes earlier, says nothing
            raise RuntimeError(
                "time is up, and no checkpoint was written in this turn; give the job more time "
                "(--slurm.time), or lower train.checkpoint_every"
            )
        if os.environ.get("SLURM_PROCID", "0") == "0":
            subprocess.run(["scontrol", "requeue", _own_id()], check=True, timeout=60)
    elif code:
        raise RuntimeError(f"`stability {shlex.join(words)}` ended with exit code {code}")


def _last_checkpoint(run: str) -> int:
    return max(checkpoint_steps(RunPaths(Path(run))), default=0) if run else 0


def _seconds_left() -> float:
    """Return the time until the job's limit; infinity for none, and where Slurm does not tell."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return float(end) - time.time() if end.isdigit() else math.inf


def _own_id() -> str:
    of_array, task = (os.environ.get(f"SLURM_ARRAY_{x}") for x in ("JOB_ID", "TASK_ID"))
    return f"{of_array}_{task}" if of_array else os.environ["SLURM_JOB_ID"]


def _tell_ranks() -> None:
    """Tell torch.distributed of this job's other tasks, as torchrun would; nothing if alone."""
    if int(os.environ.get("SLURM_NTASKS") or 1) > 1:
        submitit = importlib.import_module("submitit.helpers")  # optional
        submitit.TorchDistributedEnvironment().export(overwrite=False)
