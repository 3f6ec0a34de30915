"""Trains runs, one or several at once, each in a process that no other run has touched.

If the machine has several GPUs the processes are spread over them. A run depends on nothing but its
config and its baseline's records, so the order of runs changes no bit; only a candidate has to wait
for its baseline. A child process whose parent has died is killed, or stops at its next step where
the system has no signal for it. A child that is killed counts as a failed run, and the other runs
go on. How a fresh process is started is left to `fresh_process`, how one run is trained to
`train_run`.
"""

import os
import signal
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess

import torch

from stability.callbacks.study_observer import StudyObserver
from stability.records.atomic_files import DiskFullError
from stability.study.fresh_process import Relay, how_it_ended, received, start_process
from stability.study.run import Run, needs_no_training
from stability.study.train_run import TrainOptions, train

__all__ = ["train_in_processes"]


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
            if queue.active:
                _listen_to_all(queue, observer)
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
        slot = queue.free_slot()
        process, ours = start_process(_train_alone, run, options, slot)
        queue.active[ours] = _Child(run, process, slot)


def _listen_to_all(queue: _Queue, observer: StudyObserver) -> None:
    """Wait until a child has something to say, or has ended, and listen to each of those."""
    of_sentinel = {child.process.sentinel: of for of, child in queue.active.items()}
    ready = set(wait([*queue.active, *of_sentinel]))
    for connection in list(queue.active):
        if ready & {connection, queue.active[connection].process.sentinel}:
            _listen(queue, connection, observer)


def _listen(queue: _Queue, connection: Connection, observer: StudyObserver) -> None:
    """Forward one message of a child to `observer`, or note that the child is gone."""
    child = queue.active[connection]
    message = received(child.process, connection)
    if message is None:
        how = how_it_ended(child.process)
        del queue.active[connection]
        connection.close()
        if not child.told:
            observer.run_ended(child.run.arm.name, child.run.seed, "failed", how)
        return
    what, *values = message
    if what == "disk_full":
        queue.disk_full = values[0]
        return
    child.told = child.told or what == "run_ended"
    getattr(observer, what)(*values)


def _train_alone(connection: Connection, run: Run, options: TrainOptions, slot: int) -> None:
    """Train one run; the main function of a child process. `slot` selects one of several GPUs."""
    if torch.cuda.device_count() > 1:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        devices = visible if visible[0] else [str(i) for i in range(torch.cuda.device_count())]
        os.environ["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
    relay, name, seed = Relay(connection), run.arm.name, run.seed
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
