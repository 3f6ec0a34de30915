"""What a job of Slurm executes: the command line of one run, and another turn if it is cut short.

submitit calls `run_job` by its name in each task of a job. Slurm warns it by SIGUSR2 before the
time limit, and by SIGTERM (or SIGUSR2, with `preempt_send_user_signal`) when a preemption begins
that leaves it a GraceTime. The run is stopped as by Ctrl-C, and the job asks for a place in the
queue again, unless it was cancelled. A run goes on from its last checkpoint, to the same bits.
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

__all__ = ["DEAF_AT_FIRST", "run_job"]

WARNING_S = 90
"""How long before the end Slurm warns a job, unless it is told otherwise."""
SLACK_S = 60
"""Slurm warns up to a minute earlier than it was asked to: sbatch(1), --signal."""


FIRST_PORT, PORTS = 20000, 12000
"""Below the ports that Linux gives to whoever asks for any."""
DEAF_AT_FIRST = """sh -c 'trap "" TERM USR2; exec "$0" "$@"'"""
"""Before the words of a Python: it ignores Slurm's warnings until `run_job` listens to them. By
default one would kill it while it imports, and its job would count as failed."""
INTERRUPTED = 130
"""The exit code of a command that was stopped by Ctrl-C."""


class _Warnings:
    """What Slurm has told this process, which stops the command that is being run."""

    def __init__(self) -> None:
        self.have_come: set[signal.Signals] = set()
        self._is_running = False
        for number in (signal.SIGUSR2, signal.SIGTERM):
            signal.signal(number, self._note)

    def run(self, words: Sequence[str]) -> int:
        """Run `stability` with these words; return its exit code."""
        code, self._is_running = INTERRUPTED, True
        try:
            # by name, in a process of its own: the command line stands above this room
            code = importlib.import_module("stability.cli.main").main(list(words))
            self._is_running = False
        except KeyboardInterrupt:  # outside of what the command itself catches
            pass
        return code

    def _note(self, number: int, frame: FrameType | None) -> None:
        is_first = not self.have_come
        self.have_come.add(signal.Signals(number))
        if is_first and self._is_running:
            raise KeyboardInterrupt


def run_job(words: Sequence[str], run: str = "", warning_s: int = WARNING_S) -> None:
    """Run `stability` with these words; `run` is the folder of the run that they train.

    `warning_s` says how long before its end the job is warned. RuntimeError, which makes the job a
    failed one, if the command fails, if the job was cancelled, or if time is up and no checkpoint
    was written in this turn.
    """
    warnings, before = _Warnings(), _last_checkpoint(run)
    _tell_ranks()
    code = warnings.run(words)
    if not code:
        return
    said = f"`stability {shlex.join(words)}` ended with exit code {code}"
    if not warnings.have_come:
        raise RuntimeError(said)
    if _last_checkpoint(run) <= before and _seconds_left() < warning_s + SLACK_S:
        # another turn would get no further; a preemption, which comes earlier, says nothing
        raise RuntimeError(
            "time is up, and no checkpoint was written in this turn; give the job more time "
            "(--slurm.time), or lower train.checkpoint_every"
        )
    if os.environ.get("SLURM_PROCID", "0") == "0":
        _ask_for_another_turn(said)


def _ask_for_another_turn(said: str) -> None:
    """Put this job back into the queue; RuntimeError where Slurm has ended it already.

    `scancel`, too, begins with SIGTERM, and a job that is requeued after it would start again.
    """
    shown = _said("scontrol", "show", "job", _own_id(), "--oneliner")
    state = shown.partition("JobState=")[2].partition(" ")[0].strip()
    if state != "RUNNING":
        raise RuntimeError(f"{said}, in a job that Slurm has made {state or 'end'}")
    subprocess.run(["scontrol", "requeue", _own_id()], check=True, timeout=60)


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
    """Tell the command of this job's other tasks, as torchrun would; nothing if it is alone.

    They meet on the node of the first one, at a port by the job's number. Either can be set before.
    """
    if int(os.environ.get("SLURM_NTASKS") or 1) == 1:
        return
    names = {"RANK": "PROCID", "WORLD_SIZE": "NTASKS", "LOCAL_RANK": "LOCALID"}
    os.environ.update({name: os.environ[f"SLURM_{of}"] for name, of in names.items()})
    port = FIRST_PORT + int(os.environ["SLURM_JOB_ID"]) % PORTS
    os.environ.setdefault("MASTER_PORT", str(port))
    if "MASTER_ADDR" not in os.environ:
        os.environ["MASTER_ADDR"] = _address_of_first_node()


def _address_of_first_node() -> str:
    """Return the address by which Slurm itself finds the node of the first task."""
    first = _said("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()[0]
    said = _said("scontrol", "show", "node", first, "--oneliner")
    return said.partition("NodeAddr=")[2].split(maxsplit=1)[0]


def _said(*words: str) -> str:
    return subprocess.run(words, check=True, timeout=60, capture_output=True, text=True).stdout
