"""Trains runs, one or several at once, each in a process that no other run has touched.

What a run's modules do to their process, such as another matmul precision, ends with it: the next
one starts from a server process that has imported torch, Lightning and this package, but no module
of the user's, and has computed nothing. A bare start would cost seconds, a fork costs hundredths.

If the machine has several GPUs the processes are spread over them. A run depends on nothing but its
config and its baseline's records, so the order of runs changes no bit; only a candidate has to wait
for its baseline. A child process whose parent has died is killed, or stops at its next step where
the system has no signal for it. A child that is
killed counts as a failed run, and the other runs go on. How one run is trained is left to
`train_run`.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch

from stability.callbacks.progress import StudyObserver
from stability.records.atomic_files import DiskFullError
from stability.study.assemble import quieten_lightning
from stability.study.run import Run, needs_no_training
from stability.study.train_run import TrainOptions, train

__all__ = ["train_in_processes"]

_READY = "stability.study.preload"
"""What the server imports before it forks; by name, since this process must not import it."""
_PR_SET_PDEATHSIG = 1
"""Of `<sys/prctl.h>`."""


@dataclass(slots=True)
class _Child:
    """A process that trains one run."""

    run: Run
    process: ForkServerProcess
    slot: int
    """The number that selects its GPU: see `_Queue.free_slot`."""
    told: bool = False
    """Whether the child has reported how its run ended."""


@dataclass(slots=True)
class _Queue:
    """The runs that have not been started, those in training, and whether the disk is full."""

    waiting: list[tuple[int, Run]]
    """Runs to be started, each with its number in the study."""
    active: dict[Connection, _Child] = field(default_factory=dict)
    """Runs in training, by the parent's end of the pipe to their process."""
    disk_full: str = ""
    """The message of a child that found the disk full; empty if none has."""

    def ready(self) -> tuple[int, Run] | None:
        """Return the first run whose baseline is neither waiting nor in training, or None."""
        busy = {child.run.paths for child in self.active.values()}
        busy |= {run.paths for _, run in self.waiting}
        return next((pair for pair in self.waiting if pair[1].baseline not in busy), None)

    def free_slot(self) -> int:
        """Return the lowest number from 0 that no run in training has; it selects the GPU."""
        taken = {child.slot for child in self.active.values()}
        return min(set(range(len(taken) + 1)) - taken)


def train_in_processes(
    runs: list[Run],
    jobs: int,
    options: TrainOptions,
    observer: StudyObserver,
    *,
    first: int = 1,
    total: int = 0,
) -> None:
    """Train `runs`, up to `jobs` at once, and report the progress of all to `observer`.

    They are numbered from `first` in a study of `total`; 0 is as many as they are. A
    KeyboardInterrupt is sent on to every child and raised once all have stopped. After a
    DiskFullError in a child no other run starts; it is raised here once those in training end.
    """
    queue = _Queue(list(enumerate(runs, start=first)))
    try:
        while queue.waiting or queue.active:
            _start_ready(queue, total or len(runs), jobs, options, observer)
            for connection in wait(list(queue.active)) if queue.active else ():
                assert isinstance(connection, Connection)
                _listen(queue, connection, observer)
    except KeyboardInterrupt:
        for child in queue.active.values():
            if child.process.pid is not None and child.process.is_alive():
                os.kill(child.process.pid, signal.SIGINT)
        for child in queue.active.values():
            child.process.join()
        raise
    if queue.disk_full:
        raise DiskFullError(queue.disk_full)


def _start_ready(
    queue: _Queue, total: int, jobs: int, options: TrainOptions, observer: StudyObserver
) -> None:
    """Start runs until `jobs` are in training or none is ready; start none if the disk is full."""
    if queue.disk_full:
        queue.waiting.clear()
    while len(queue.active) < jobs and (pair := queue.ready()) is not None:
        queue.waiting.remove(pair)
        index, run = pair
        if needs_no_training(run, observer):
            continue
        observer.run_started(index, total, run.arm.name, run.seed, run.last_step)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([_READY])
        ours, theirs = context.Pipe(duplex=False)
        slot = queue.free_slot()
        process = context.Process(
            target=_train_alone, args=(theirs, run, options, torch.get_num_threads(), slot)
        )
        with _waiting_threads_sleep():
            process.start()
        theirs.close()
        queue.active[ours] = _Child(run, process, slot)


def _listen(queue: _Queue, connection: Connection, observer: StudyObserver) -> None:
    """Forward one message of a child to `observer`, or note that the child is gone."""
    child = queue.active[connection]
    try:
        what, *values = connection.recv()
    except EOFError:
        child.process.join()
        del queue.active[connection]
        connection.close()
        if not child.told:
            code = child.process.exitcode or 0
            how = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
            observer.run_ended(child.run.arm.name, child.run.seed, "failed", how)
        return
    if what == "disk_full":
        queue.disk_full = values[0]
        return
    child.told = child.told or what == "run_ended"
    getattr(observer, what)(*values)


@contextmanager
def _waiting_threads_sleep() -> Iterator[None]:
    """Inside the context, start children whose idle OpenMP threads sleep instead of spin.

    Two children with spinning threads slow each other down 30-fold. A child reads the variable when
    it starts, so it need not stay set here. It decides how a thread waits and not what it computes,
    so no bit depends on it. A policy that the user has set is left as it is.
    """
    before = os.environ.get("OMP_WAIT_POLICY")
    os.environ["OMP_WAIT_POLICY"] = before or "PASSIVE"
    try:
        yield
    finally:
        if before is None:
            del os.environ["OMP_WAIT_POLICY"]


class _Relay:
    """The observer inside a child process: sends each call to the parent, which repeats it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def run_started(self, index: int, total: int, arm: str, seed: int, steps: int) -> None:
        """Send it."""
        self._send("run_started", index, total, arm, seed, steps)

    def run_advanced(self, arm: str, seed: int, step: int, loss: float) -> None:
        """Send it."""
        self._send("run_advanced", arm, seed, step, loss)

    def run_noted(self, arm: str, seed: int, text: str) -> None:
        """Send it."""
        self._send("run_noted", arm, seed, text)

    def study_noted(self, text: str) -> None:
        """Send it."""
        self._send("study_noted", text)

    def run_ended(self, arm: str, seed: int, state: str, message: str) -> None:
        """Send it."""
        self._send("run_ended", arm, seed, state, message)

    def disk_full(self, message: str) -> None:
        """Send it."""
        self._send("disk_full", message)

    def _send(self, *message: object) -> None:
        try:
            self._connection.send(message)
        except BrokenPipeError:
            # The parent is gone. An interrupt ends the training, and the run can be resumed.
            raise KeyboardInterrupt from None


def _die_with_parent() -> None:
    """Ask Linux to kill this process when the server that it was forked from ends.

    The server ends with the process that started it, however that ended. Without this, a run whose
    command was killed would keep its lock until its next step. Elsewhere that is what happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _train_alone(
    connection: Connection, run: Run, options: TrainOptions, threads: int, slot: int
) -> None:
    """Train one run; the main function of a child process.

    `slot` selects one of several GPUs. `threads` is the parent's number of torch threads, so
    that a run computes as it would have in the parent.
    """
    _die_with_parent()
    # a terminal sends Ctrl-C to its whole process group: only the parent gets it and sends it on,
    # so that a child is not interrupted twice
    os.setpgrp()
    if torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible[0] else [str(i) for i in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    torch.set_num_threads(threads)
    quieten_lightning()
    relay, name, seed = _Relay(connection), run.arm.name, run.seed
    try:
        manifest = train(run, options, relay)
        relay.run_ended(name, seed, manifest.state, manifest.message)
    except KeyboardInterrupt:
        return
    except DiskFullError as error:
        # first, so that the parent starts no other run
        relay.disk_full(str(error))
        relay.run_ended(name, seed, "interrupted", str(error))
    except Exception as error:
        relay.run_ended(name, seed, "failed", f"{type(error).__name__}: {error}")
