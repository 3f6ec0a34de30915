"""A run whose ranks a scheduler has started as tasks, on one machine or on several.

Each task is told its place by the variables that torchrun sets, too, and trains its own rank in a
process of its own. The tasks meet at a store that the first one keeps. There it says whether the
run has to be trained and, at the end, whether it is, and the others say what has failed with them.
Leaves out who starts tasks (`execute.slurm_job`) and what a rank computes.
"""

import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from stability.model.ranks import Ranks, meeting_place
from stability.study.assemble import PROCESS_COUNTS

__all__ = ["Meeting", "RankTask", "failure_of", "meeting", "this_task"]

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
PAUSE_S = 0.1
LEAVING_S = 20.0
"""How long the first task waits for the others to have heard its last word, or to say why they have
failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankTask:
    """The place of this process among the tasks of a run."""

    ranks: Ranks
    local: int
    """Its number on its machine, which selects its GPU."""

    def check(self, ranks: int) -> None:
        """ValueError unless a run over so many `ranks` has as many tasks."""
        if ranks != self.ranks.count:
            raise ValueError(
                f"WORLD_SIZE must be {ranks}, as many tasks as the run's layout (parallel) has "
                f"ranks, got {self.ranks.count}; or unset it, and all ranks train on this machine"
            )


def this_task(variables: MutableMapping[str, str]) -> RankTask | None:
    """Return the place that `variables` tell; None for a process that is alone.

    ValueError if one of VARIABLES is missing, or is no number.
    """
    if variables.get("WORLD_SIZE", "") in ("", "1"):
        return None
    missing = [name for name in VARIABLES if not variables.get(name)]
    if missing:
        raise ValueError(
            f"{missing[0]} must be set where WORLD_SIZE is; a task of a run over ranks needs "
            f"{', '.join(VARIABLES)}"
        )
    numbers = {x: variables[x] for x in VARIABLES if x != "MASTER_ADDR"}
    for name, text in numbers.items():
        if not text.isdecimal():
            raise ValueError(f"{name} must be a whole number, got {text!r}")
    rank, count, local, port = (int(text) for text in numbers.values())
    ranks = Ranks(rank=rank, count=count, host=variables["MASTER_ADDR"], port=port)
    return RankTask(ranks=ranks, local=local)


@dataclass(slots=True)
class Meeting:
    """The store at which the tasks of one run meet, as this task sees it."""

    task: RankTask
    store: Any
    is_told: set[str] = field(default_factory=set)
    is_ours: bool = True
    """Whether the store is known to be of no other run."""

    def tell(self, what: str, word: str) -> None:
        """Tell all tasks; what was told before stands."""
        if what not in self.is_told:
            self.is_told.add(what)
            self.store.set(what, word)

    def hear(self, what: str) -> str:
        """Wait until the first task tells it, and return it; "" if that task is gone."""
        with suppress(RuntimeError):  # what torch raises once nobody keeps the store
            while not self.store.check([what]):
                time.sleep(PAUSE_S)
            return self.store.get(what).decode()
        return ""

    def failures(self) -> list[tuple[int, str]]:
        """Return what has failed in other tasks, by rank, once one tells it or all have left."""
        others = range(1, self.task.ranks.count)
        end = time.monotonic() + LEAVING_S
        while time.monotonic() < end:
            found = [x for x in others if self.store.check([failure_of(x)])]
            if found or self._left() >= len(others):
                return [(x, self.store.get(failure_of(x)).decode()) for x in found]
            time.sleep(PAUSE_S)
        return []

    def is_over(self) -> bool:
        """Whether another task's rank has failed, as the first task sees it, or the run has ended.

        So it has where the first task is gone.
        """
        names = ["end"]
        if self.task.ranks.is_first:
            names = [failure_of(rank) for rank in range(1, self.task.ranks.count)]
        try:
            return any(self.store.check([name]) for name in names)
        except RuntimeError:
            return True

    def start(self, word: str, run: str) -> None:
        """Tell the other tasks whether there is something to train, and of which run."""
        self.tell("start", f"{word} {run}")

    def started(self, run: str) -> str:
        """Return what the first task tells of the start; ValueError if that is of another run."""
        word, _, known = self.hear("start").partition(" ")
        if known and known != run:
            self.is_ours = False
            raise ValueError(
                f"MASTER_ADDR and MASTER_PORT must be those of {run}, at "
                f"{self.task.ranks.host}:{self.task.ranks.port} is {known}"
            )
        return word

    def leave(self) -> None:
        """Leave; the first task keeps the store until all others have, for some time."""
        if not self.is_ours:
            return
        if not self.task.ranks.is_first:
            self.store.add("left", 1)
            return
        self.tell("start", "stop")
        self.tell("end", "failed")
        end = time.monotonic() + LEAVING_S
        while self._left() < self.task.ranks.count - 1 and time.monotonic() < end:
            time.sleep(PAUSE_S)

    def _left(self) -> int:
        return self.store.add("left", 0)


def failure_of(rank: int) -> str:
    """Return the name under which the task of a rank tells its failure."""
    return f"failure of {rank}"


@contextmanager
def meeting(task: RankTask, variables: MutableMapping[str, str]) -> Iterator[Meeting]:
    """Meet the other tasks. What names them is taken out of `variables`: others would follow it."""
    for name in (*VARIABLES, *PROCESS_COUNTS):
        variables.pop(name, None)
    ranks = task.ranks
    found = Meeting(task, meeting_place(ranks.host, ranks.port, keeps=ranks.is_first))
    try:
        yield found
    finally:
        with suppress(RuntimeError):  # the first task is gone, or another process keeps its port
            found.leave()
