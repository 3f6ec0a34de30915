"""The processes that train one run: one, or as many as its layout has ranks.

Where a scheduler has started a task for each rank, on whatever machines, each task has one of them.

The first rank keeps the record and tells of the run; another one tells only how it failed. Where
one is gone the others can't go on, and say that a connection was lost: what is told of the run is
the failure that came before, with its rank. Leaves out which run is trained when (`processes`).
"""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import Any

from stability.callbacks.study_observer import StudyObserver
from stability.model.ranks import ALONE, Ranks, is_lost_connection, meeting_place
from stability.records.atomic_files import DiskFullError
from stability.records.manifest import ENDED, read_manifest, write_manifest
from stability.study.call_over_ranks import see_one_gpu
from stability.study.follow_run import follow
from stability.study.fresh_process import Relay, how_it_ended, received, start_process
from stability.study.run import Run, RunConflictError, locked
from stability.study.train_run import TrainOptions, train

__all__ = ["RankProcesses"]

GRACE = 20.0
"""Seconds that the other ranks have to end by themselves once one has failed."""


@dataclass(slots=True)
class RankProcesses:
    """The processes of one run, by our ends of their connections."""

    run: Run
    slot: int
    """The number that selects the first one's GPU."""
    members: dict[Connection, tuple[int, ForkServerProcess]] = field(default_factory=dict)
    """Those that have not ended: rank and process."""
    disk_full: str = ""
    is_first: bool = True
    """Whether the first rank is among them: else another task tells of the run."""
    elsewhere: Callable[[], list[tuple[int, str]]] = list
    """Returns what has failed in ranks that other tasks train."""
    is_over: Callable[[], bool] | None = None
    """Whether other tasks have told that the run has failed, or ended: to be asked now and then."""
    failures: list[tuple[int, str]] = field(default_factory=list)
    """What has failed in these, by rank."""
    wandb_failures: list[str] = field(default_factory=list)
    """The study's, of which later runs are told as they start."""
    _store: Any = None
    _ending: tuple[str, str] | None = None
    """The state and message that the first rank has told of the run's end."""
    _deadline: float | None = None

    @classmethod
    def start_one(
        cls,
        run: Run,
        options: TrainOptions,
        slot: int,
        ranks: Ranks,
        elsewhere: Callable[[], list[tuple[int, str]]],
        is_over: Callable[[], bool],
    ) -> "RankProcesses":
        """Start the process of one rank, where other tasks start the others."""
        started = cls(run, slot, is_first=ranks.is_first, elsewhere=elsewhere, is_over=is_over)
        process, ours = start_process(_train_alone, run, options, slot, ranks)
        started.members[ours] = ranks.rank, process
        return started

    @classmethod
    def start(cls, run: Run, options: TrainOptions, slot: int) -> "RankProcesses":
        """Start the processes of `run`."""
        started = cls(run, slot, wandb_failures=options.wandb_failures)
        count = run.config.parallel.ranks
        port = 0
        if count > 1:
            started._store = meeting_place(ALONE.host)
            port = started._store.port
        for rank in range(count):
            ranks = Ranks(rank=rank, count=count, port=port) if count > 1 else ALONE
            process, ours = start_process(_train_alone, run, options, slot + rank, ranks)
            started.members[ours] = rank, process
        return started

    @property
    def remaining(self) -> float | None:
        """The seconds until `kill` is due; None if it is not."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def look_elsewhere(self) -> None:
        """Give this task's rank some seconds more once another's has ended: it may wait for it."""
        if self.is_over is not None and self._deadline is None and self.is_over():
            self._begin_to_end()

    def interrupt(self) -> None:
        """Pass an interrupt on."""
        for _, process in self.members.values():
            if process.pid is not None and process.is_alive():
                os.kill(process.pid, signal.SIGINT)

    def join(self) -> None:
        """Wait until all have ended; ranks that wait for one that is gone are killed."""
        is_alone = self.run.config.parallel.ranks == 1
        end = time.monotonic() + GRACE
        for _, process in self.members.values():
            process.join(None if is_alone else max(0.0, end - time.monotonic()))
        self.kill()
        for _, process in self.members.values():
            process.join()

    def kill(self) -> None:
        """Kill what has not ended by itself: it waits for a rank that is gone."""
        for _, process in self.members.values():
            process.kill()

    def listen(self, connection: Connection, observer: StudyObserver) -> None:
        """Take one message of a process, or note that it has ended; tell `observer`."""
        rank, process = self.members[connection]
        message = received(process, connection)
        if message is None:
            del self.members[connection]
            connection.close()
            self._note_end(rank, process)
            if not self.members:
                self._report(observer)
            return
        what, *values = message
        if what == "disk_full":
            self.disk_full = values[0]
        elif what == "wandb_failed":
            # of runs that have started at once each one tries
            if not self.wandb_failures:
                observer.wandb_failed(*values)
            self.wandb_failures.append(values[-1])
        elif what == "rank_failed":
            self._note_failure(rank, values[0])
        elif what == "run_ended":
            self._ending = values[2], values[3]
            self._begin_to_end()
        else:
            getattr(observer, what)(*values)

    def _note_end(self, rank: int, process: ForkServerProcess) -> None:
        how, was_told = how_it_ended(process), rank == 0 and self._ending is not None
        is_news = process.exitcode and self._deadline is None
        if not was_told and (is_news or rank == 0):
            self._note_failure(rank, how)

    def _note_failure(self, rank: int, text: str) -> None:
        self.failures.append((rank, text))
        self._begin_to_end()

    def _begin_to_end(self) -> None:
        # of one process nobody waits for another: it ends when it does
        if self._deadline is None and self.run.config.parallel.ranks > 1:
            self._deadline = time.monotonic() + GRACE

    def _report(self, observer: StudyObserver) -> None:
        """Tell how the run has ended, once all processes have."""
        if not self.is_first and not self.failures:
            return
        state, message = self._ending or ("failed", "")
        if self.is_first and state == "failed" and (not message or is_lost_connection(message)):
            self.failures += self.elsewhere()
        if state == "failed" and len(self.failures) + bool(message):
            message = self._cause(message)
            # that another rank is gone is the first task's to tell: it knows why
            is_ours = self.is_first or not is_lost_connection(message)
            if is_ours and self.run.config.parallel.ranks > 1:
                _put_on_record(self.run, message)
        observer.run_ended(self.run.arm.name, self.run.seed, state, message)

    def _cause(self, message: str) -> str:
        """Return what has ended a run: the first failure that is no consequence of another."""
        told = [(0, message)] if message else []
        every = [*self.failures, *told]
        causes = [each for each in every if not is_lost_connection(each[1])] or every
        rank, text = causes[0]
        return (
            text
            if self.run.config.parallel.ranks == 1 or (rank, text) in told
            else (f"rank {rank}: {text}")
        )


def _put_on_record(run: Run, message: str) -> None:
    """Say in the manifest why a run over ranks has failed: its first rank may not know, or live."""
    with suppress(RunConflictError, OSError, ValueError), locked(run.paths):
        manifest = read_manifest(run.paths.manifest)
        is_told = manifest.state == "failed" and not is_lost_connection(manifest.message)
        # whoever was interrupted, or had a full disk, leaves the others without a connection
        is_told |= manifest.state == "interrupted" and is_lost_connection(message)
        if manifest.state not in ENDED and not is_told:
            write_manifest(run.paths.manifest, replace(manifest, state="failed", message=message))


def _train_alone(
    connection: Connection, run: Run, options: TrainOptions, slot: int, ranks: Ranks
) -> None:
    """Train a rank's part of a run; the main function of a process. `slot` selects a GPU."""
    see_one_gpu(slot)
    if not ranks.is_first:
        _follow(connection, run, options, ranks)
        return
    relay, name, seed = Relay(connection), run.arm.name, run.seed
    try:
        manifest = train(run, options, relay, ranks)
        relay.run_ended(name, seed, manifest.state, manifest.message)
    except KeyboardInterrupt:
        return
    except DiskFullError as error:
        # first, so that the parent starts no other run
        relay.disk_full(str(error))
        relay.run_ended(name, seed, "interrupted", str(error))
    except Exception as error:
        relay.run_ended(name, seed, "failed", f"{type(error).__name__}: {error}")


def _follow(connection: Connection, run: Run, options: TrainOptions, ranks: Ranks) -> None:
    try:
        follow(run, ranks, checks_observer=options.check_observer)
    except KeyboardInterrupt:
        return
    except Exception as error:
        with suppress(OSError):
            connection.send(("rank_failed", f"{type(error).__name__}: {error}"))
