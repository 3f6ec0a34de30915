"""Waits for jobs that train runs elsewhere, and tells an observer how each of them goes.

What is known of a run is read from its records; of its job, only whether it has ended. Leaves out
how a job is asked after (`slurm_queue`, `ray_tasks`).
"""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from stability.callbacks.study_observer import StudyObserver
from stability.execute.executor import PlannedRun
from stability.execute.standing import FINISH, Key, Standing
from stability.records.log_tail import last_logged
from stability.records.manifest import has_ended, read_manifest
from stability.records.metric_names import TRAIN_LOSS

__all__ = ["wait_for", "with_jobs_left"]

R = TypeVar("R", bound=PlannedRun)

POLL_S = 5.0
"""Between two looks: a queue serves others too."""
GONE_LOOKS = 2
"""After how many looks without its job a run counts as ended: a shared disk may lag behind."""


class _Waiting:
    """The runs whose end has not been told yet."""

    def __init__(self, runs: Sequence[PlannedRun], observer: StudyObserver) -> None:
        self._observer = observer
        self._total = len(runs)
        self._left = dict(enumerate(runs, start=1))
        self._began: set[Key] = set()
        self._gone: dict[Key, int] = {}

    def __bool__(self) -> bool:
        return bool(self._left)

    def look(self, jobs: Mapping[Key, Standing], said_of: Callable[[Key], str]) -> None:
        """Tell of each run what is new; `said_of` tells where its job has printed."""
        for index, run in list(self._left.items()):
            key = run.arm.name, run.seed
            if has_ended(run.paths):
                self._end(index, *_ending(run))
            elif key in jobs:
                self._gone.pop(key, None)
                if jobs[key].state == "running":
                    self._advance(index, key)
            else:
                self._gone[key] = self._gone.get(key, 0) + 1
                if self._gone[key] >= GONE_LOOKS:
                    self._end(index, *_ending(run, said_of(key)))

    def _advance(self, index: int, key: Key) -> None:
        run = self._left[index]
        if key not in self._began:
            self._began.add(key)
            self._observer.run_started(index, self._total, *key, run.last_step)
        found = last_logged(run.paths.metrics, TRAIN_LOSS)
        if found:
            self._observer.run_advanced(*key, *found)

    def _end(self, index: int, state: str, message: str) -> None:
        run = self._left.pop(index)
        self._observer.run_ended(run.arm.name, run.seed, state, message)


def _ending(run: PlannedRun, printed: str = "") -> tuple[str, str]:
    """Return how a run ended whose job is gone: its state, and what there is to say."""
    if not run.paths.manifest.exists():
        if run.baseline is not None and not has_ended(run.baseline):
            return "skipped", "its baseline did not finish"
        return "failed", f"its job ended before it began to train; {printed}"
    manifest = read_manifest(run.paths.manifest)
    state = "interrupted" if manifest.state == "running" else manifest.state
    return state, manifest.message or ("" if has_ended(run.paths) else f"its job ended; {printed}")


def wait_for(
    runs: Sequence[PlannedRun],
    observer: StudyObserver,
    look: Callable[[], Mapping[Key, Standing] | None],
    said_of: Callable[[Key], str],
) -> None:
    """Return once every run has ended, or its job has, and the job that follows them.

    `look` returns the jobs that have not ended, None if they can't be asked after now.
    """
    waiting, gone = _Waiting(runs, observer), 0
    try:
        while waiting or gone < GONE_LOOKS:
            jobs = look()
            if jobs is not None:
                waiting.look(jobs, said_of)
                gone = 0 if FINISH in jobs else gone + 1
            if waiting or gone < GONE_LOOKS:
                time.sleep(POLL_S)
    except KeyboardInterrupt:
        observer.study_noted("detached: the jobs go on, and the same command attaches to them")
        raise


def with_jobs_left(runs: Sequence[R], observer: StudyObserver) -> list[R]:
    """Return the runs that have not ended; tell of the others that they are kept."""
    for run in runs:
        if has_ended(run.paths):
            observer.run_ended(run.arm.name, run.seed, "finished", "kept")
    return [run for run in runs if not has_ended(run.paths)]
