"""What an executor is: whoever brings the runs of a study to their end, each after its baseline.

There are three. Local processes are forked from the command itself and end with it
(`study.processes`); jobs of Slurm (`slurm`) and tasks of Ray (`ray_tasks`) outlive it. Those start
the command line `stability run STUDY --only ARM --seed N`, which trains one run whoever calls it.
Leaves out what a run is and how it is trained, which is the study's.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from stability.callbacks.study_observer import StudyObserver
from stability.records.paths import RunPaths

__all__ = ["Executor", "PlannedRun", "StudyCommand", "needed", "one_rank"]


class _Arm(Protocol):
    @property
    def name(self) -> str: ...


class PlannedRun(Protocol):
    """What an executor needs to know of a run."""

    @property
    def arm(self) -> _Arm:
        """What it trains."""
        ...

    @property
    def seed(self) -> int:
        """The seed it is repeated with."""
        ...

    @property
    def paths(self) -> RunPaths:
        """Where its records are."""
        ...

    @property
    def baseline(self) -> RunPaths | None:
        """The run that must have ended before; None for a baseline."""
        ...

    @property
    def last_step(self) -> int:
        """The step at which it ends."""
        ...


R = TypeVar("R", bound=PlannedRun, contravariant=True)


class Executor(Protocol[R]):
    """Brings runs to their end."""

    def train(self, runs: Sequence[R], observer: StudyObserver) -> None:
        """Start what has to be trained and wait for it; tell `observer` how each run goes.

        A run that has ended is kept, and one that is under way is waited for. How a run ended is in
        its manifest. KeyboardInterrupt if the user interrupts.
        """
        ...


Ranks = Callable[[PlannedRun], int]
"""How many processes a run trains in."""


def one_rank(run: PlannedRun) -> int:
    """Return 1: a run trains in one process."""
    return 1


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyCommand:
    """The command line that trains a study, for jobs that train a part of it."""

    words: tuple[str, ...]
    """After `stability`: `run`, the study's file and its options, paths in full."""
    folder: Path
    """The study's folder of records."""
    name: str
    """The study's name."""

    def one(self, arm: str, seed: int) -> list[str]:
        """Return the words that train one run."""
        return [*self.words, "--only", arm, "--seed", str(seed)]

    def finish(self) -> list[str]:
        """Return the words that measure what follows the runs, and train none."""
        return [*self.words, "--finish"]


PROGRAM = (sys.executable, "-m", "stability.cli.main")
"""What `stability` is, whatever PATH says."""


def needed(package: str, extra: str) -> Any:
    """Return an optional package; ValueError, which names the extra, where it is not installed."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ValueError(
            f"--executor {extra} needs the package {package}, which can't be imported: {error}; "
            f"pip install 'training-stability[{extra}]'"
        ) from error
