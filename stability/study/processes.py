"""Trains runs, one or several at once, each in processes that no other run has touched.

If the machine has several GPUs the processes are spread over them. A run depends on nothing but its
config and its baseline's records, so the order of runs changes no bit; only a candidate has to wait
for its baseline. A child process whose parent has died is killed, or stops at its next step where
the system has no signal for it. A child that is killed counts as a failed run, and the other runs
go on. Leaves out how a fresh process is started (`fresh_process`), which ones a run has
(`rank_processes`) and how it is trained (`train_run`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import wait

from stability.callbacks.study_observer import StudyObserver
from stability.records.atomic_files import DiskFullError
from stability.study.rank_processes import RankProcesses
from stability.study.rank_tasks import Meeting
from stability.study.run import Run, needs_no_training
from stability.study.train_run import TrainOptions

__all__ = ["train_in_processes", "train_one_rank"]

PAUSE_S = 1.0
"""How long to listen before what other tasks have told is looked at."""


@dataclass(slots=True)
class _Queue:
    """The runs that have not been started, those in training, and whether the disk is full."""

    waiting: list[tuple[int, Run]]
    """Runs to be started, each with its number in the study."""
    active: list[RankProcesses] = field(default_factory=list)
    """Runs in training."""
    disk_full: str = ""
    """The message of a child that found the disk full; empty if none has."""
    on_end: Callable[[Run], None] = lambda _: None
    """Called with each run that has ended or failed, or will not be started."""

    def ready(self) -> tuple[int, Run] | None:
        """Return the first run whose baseline is neither waiting nor in training, or None."""
        busy = {each.run.paths for each in self.active}
        busy |= {run.paths for _, run in self.waiting}
        return next((pair for pair in self.waiting if pair[1].baseline not in busy), None)

    def free_slot(self, ranks: int) -> int:
        """Return the lowest number from 0 from which `ranks` are free; they select the GPUs."""
        taken = {each.slot + rank for each in self.active for rank in range(_ranks(each.run))}
        first = 0
        while taken & set(range(first, first + ranks)):
            first += 1
        return first

    def has_room(self, run: Run, jobs: int) -> bool:
        """Whether `run` may start among so many processes; one that is wider alone may."""
        used = sum(_ranks(each.run) for each in self.active)
        return not self.active or used + _ranks(run) <= jobs


def _ranks(run: Run) -> int:
    return run.config.parallel.ranks


def train_in_processes(
    runs: list[Run],
    jobs: int,
    options: TrainOptions,
    observer: StudyObserver,
    on_end: Callable[[Run], None] = lambda _: None,
) -> None:
    """Train `runs`, up to `jobs` at once, and report the progress of all to `observer`.

    `on_end` is called with each run that has ended or failed, or is not started since it has ended
    before or its baseline did not; before it has returned no other run starts. A KeyboardInterrupt
    is sent on to every child and raised once all have stopped. After a DiskFullError in a child no
    other run starts; it is raised here once those in training end. What `on_end` raises interrupts
    the others too.
    """
    queue = _Queue([*enumerate(runs, start=1)], on_end=on_end)

    def start() -> None:
        _start_ready(queue, len(runs), jobs, options, observer)

    _bring_to_end(queue, start, observer)


def train_one_rank(
    run: Run, options: TrainOptions, observer: StudyObserver, meeting: Meeting
) -> list[tuple[int, str]]:
    """Train the rank of this task, of a run whose other ranks other tasks train.

    Returns what has failed in it, by rank. Errors as `train_in_processes`.
    """
    ranks = meeting.task.ranks
    one = RankProcesses.start_one(
        run, options, meeting.task.local, ranks, meeting.failures, meeting.is_over
    )
    if ranks.is_first:
        observer.run_started(1, 1, run.arm.name, run.seed, run.last_step)
    _bring_to_end(_Queue([], [one]), lambda: None, observer)
    return one.failures


def _bring_to_end(queue: _Queue, start: Callable[[], None], observer: StudyObserver) -> None:
    """Listen to all that trains until nothing does or waits to; `start` starts what may."""
    try:
        while queue.waiting or queue.active:
            start()
            if queue.active:
                _listen_to_all(queue, observer)
    except BaseException:
        for each in queue.active:
            each.interrupt()
        for each in queue.active:
            each.join()
        raise
    if queue.disk_full:
        raise DiskFullError(queue.disk_full)


def _start_ready(
    queue: _Queue, total: int, jobs: int, options: TrainOptions, observer: StudyObserver
) -> None:
    """Start runs until `jobs` are in training or none is ready; start none if the disk is full."""
    if queue.disk_full:
        queue.waiting.clear()
    while (pair := queue.ready()) is not None and queue.has_room(pair[1], jobs):
        queue.waiting.remove(pair)
        index, run = pair
        if needs_no_training(run, observer):
            queue.on_end(run)
            continue
        observer.run_started(index, total, run.arm.name, run.seed, run.last_step)
        queue.active.append(RankProcesses.start(run, options, queue.free_slot(_ranks(run))))


def _listen_to_all(queue: _Queue, observer: StudyObserver) -> None:
    """Wait until a process has something to say, or has ended, and listen to each of those."""
    members = [(one, each) for each in queue.active for one in each.members.items()]
    sources = [source for (ours, (_, process)), _ in members for source in (ours, process.sentinel)]
    limits = [each.remaining for each in queue.active if each.remaining is not None]
    limits += [PAUSE_S for each in queue.active if each.is_over is not None]
    ready = set(wait(sources, timeout=min(limits, default=None)))
    for (connection, (_, process)), each in members:
        if ready & {connection, process.sentinel}:
            each.listen(connection, observer)
            queue.disk_full = queue.disk_full or each.disk_full
    for each in queue.active:
        each.look_elsewhere()
        if each.remaining == 0:
            each.kill()
    ended = [each for each in queue.active if not each.members]
    queue.active = [each for each in queue.active if each.members]
    for each in ended:
        queue.on_end(each.run)
