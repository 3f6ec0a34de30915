"""Trains the runs of a study as jobs of Slurm, which submitit submits: an array of jobs for an arm.

The baselines of all seeds are one array, and each other arm is an array in which a job starts once
the baseline of its seed has ended well (`aftercorr`). One more job follows them all and measures
what `stability run` measures after its runs. Each job trains one run by the command line `stability
run STUDY --only ARM --seed N`; Slurm requeues it after a preemption or the failure of its node, and
it goes on from its checkpoint. Ctrl-C leaves the jobs alone, and the same command finds them again
by their ids on disk (`job_record`).
"""

import secrets
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from stability.callbacks.study_observer import StudyObserver
from stability.execute.attached import wait_for, with_jobs_left
from stability.execute.executor import PlannedRun, Ranks, StudyCommand, needed, one_rank
from stability.execute.job_record import (
    JobArray,
    array_of,
    read_arrays,
    submitting,
    write_arrays,
)
from stability.execute.slurm_job import DEAF_AT_FIRST, WARNING_S, run_job
from stability.execute.slurm_queue import QueueError, cancel, check_slurm, queued
from stability.execute.standing import FINISH, Key, Standing
from stability.records.manifest import has_ended
from stability.records.paths import StudyPaths

__all__ = ["PlannedArray", "SlurmArrays", "plan_arrays", "standing_jobs"]

OURS = (
    "array",
    "dependency",
    "error",
    "job-name",
    "kill-on-invalid-dep",
    "ntasks",
    "open-mode",
    "output",
)
"""Options of sbatch that are decided here."""
OF_SUBMITIT = {"array-parallelism": int, "setup": lambda text: [text], "signal-delay-s": int}
"""Options that submitit takes, and how their text is read; all others go to sbatch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedArray:
    """Jobs to be submitted together."""

    arm: str
    seeds: tuple[int, ...]
    after: JobArray | None = None
    """The array of their baselines; None if those have ended, or it holds the baselines itself."""
    ranks: int = 1

    def dependency(self, baselines: JobArray | None) -> str:
        """Return what sbatch is told of `baselines`, under their id; empty for nothing."""
        if baselines is None:
            return ""
        first, *others = self.seeds
        return f"aftercorr:{baselines.id}" if others else f"afterok:{baselines.id_of(first)}"


def plan_arrays(
    runs: Sequence[PlannedRun], under_way: Callable[[Key], JobArray | None], ranks: Ranks = one_rank
) -> list[PlannedArray]:
    """Return the arrays that train those of `runs` that are not under way, baselines first.

    `under_way` returns the array of a run whose job is in the queue. An array that is to follow one
    that is planned here has one without a name as `after`.
    """
    missing = [run for run in runs if under_way((run.arm.name, run.seed)) is None]
    missing.sort(key=lambda run: run.baseline is not None)
    arms = dict.fromkeys(run.arm.name for run in missing)
    of_arm = {arm: [run for run in missing if run.arm.name == arm] for arm in arms}
    planned: list[PlannedArray] = []
    baselines: dict[int, JobArray] = {}
    for arm, its_runs in of_arm.items():
        seeds, count = tuple(run.seed for run in its_runs), ranks(its_runs[0])
        if its_runs[0].baseline is None:
            planned.append(PlannedArray(arm=arm, seeds=seeds, ranks=count))
            baselines |= dict.fromkeys(seeds, JobArray(name="", arm=arm, seeds=seeds))
            continue
        for seeds, after in _by_baseline(its_runs, baselines, under_way):
            planned.append(PlannedArray(arm=arm, seeds=seeds, after=after, ranks=count))
    return planned


def _by_baseline(
    runs: Sequence[PlannedRun],
    planned: Mapping[int, JobArray],
    under_way: Callable[[Key], JobArray | None],
) -> list[tuple[tuple[int, ...], JobArray | None]]:
    """Return the seeds of an arm's runs in groups that one dependency fits."""
    groups: dict[JobArray | None, list[int]] = {}
    for run in runs:
        assert run.baseline is not None
        after = planned.get(run.seed)
        if after is None and not has_ended(run.baseline):
            after = under_way((run.baseline.arm, run.seed))
        groups.setdefault(after, []).append(run.seed)
    found: list[tuple[tuple[int, ...], JobArray | None]] = []
    for after, seeds in groups.items():
        # `aftercorr` pairs jobs by their number in both arrays, which must hold the same seeds
        if after is None or tuple(seeds) == after.seeds:
            found.append((tuple(seeds), after))
        else:
            found += [((seed,), after) for seed in seeds]
    return found


def tasks_of(ranks: int, options: Mapping[str, str]) -> dict[str, int]:
    """Return what sbatch is told of the tasks of a run over so many ranks.

    One task trains all of them as processes of its own if it has the GPUs for it, or if `options`
    tell nothing of a node's: else each is a task, which `srun` starts, on as many nodes as they
    take.
    ValueError for an option that is no number.
    """
    tasks, gpus = (_count(options, x) for x in ("ntasks-per-node", "gpus-per-node"))
    per_node = tasks or gpus
    if ranks == 1 or not per_node or (ranks <= per_node and not tasks):
        return {"ntasks": 1}
    return {"nodes": -(-ranks // per_node), "ntasks": ranks, "ntasks-per-node": per_node}


def _count(options: Mapping[str, str], name: str) -> int:
    """Return the number in an option of sbatch, the 8 of `8` and of `a100:8`; 0 where not given."""
    text = options.get(name, "0").rpartition(":")[2]
    if not text.isdecimal():
        raise ValueError(f"--slurm.{name} must be a number, got {options[name]!r}")
    return int(text)


class SlurmArrays:
    """The executor that trains by jobs of Slurm: see `executor.Executor`."""

    def __init__(
        self, command: StudyCommand, options: Mapping[str, str], ranks: Ranks = one_rank
    ) -> None:
        """Take the options of sbatch, without dashes before them; writes and submits nothing.

        ValueError where submitit or Slurm is not here, and for an option that is decided here.
        """
        self._submitit = needed("submitit", "slurm")
        check_slurm()
        for name in options:
            if name in OURS:
                raise ValueError(
                    f"--slurm.{name}: must not be given: the jobs of a study need their own"
                )
        self._command, self._options, self._ranks = command, dict(options), ranks

    def train(self, runs: Sequence[PlannedRun], observer: StudyObserver) -> None:
        """Submit a job for each run that has not ended and has none, and wait for all of them.

        ValueError, in sbatch's own words, if it refuses a job.
        """
        folder, left = self._command.folder, with_jobs_left(runs, observer)
        if not left:
            return
        with submitting(folder):
            arrays, count = self._submit_missing(left)
        observer.study_noted(
            f"{count} jobs submitted to Slurm, {len(left) + 1 - count} under way; Ctrl-C leaves "
            "them there, and `stability status` shows them"
        )
        wait_for(left, observer, lambda: _look(folder), lambda key: self._printed(arrays, key))

    def _submit_missing(self, runs: Sequence[PlannedRun]) -> tuple[list[JobArray], int]:
        """Submit what is not in the queue; return all arrays, and the number of new jobs."""
        arrays = _with_ids(read_arrays(self._command.folder))
        jobs = standing_jobs(arrays)

        def under_way(key: Key) -> JobArray | None:
            return array_of(arrays, *key) if key in jobs else None

        folders = {(run.arm.name, run.seed): run.paths.root for run in runs}
        planned, count = plan_arrays(runs, under_way, self._ranks), 0
        for each in planned:
            after = array_of(arrays, each.after.arm, each.seeds[0]) if each.after else None
            calls = [(self._command.one(each.arm, x), folders[each.arm, x]) for x in each.seeds]
            self._submit(arrays, each.arm, each.seeds, calls, each.dependency(after), each.ranks)
            count += len(each.seeds)
        if planned and FINISH in jobs:
            # it was to follow the older jobs alone
            cancel(jobs[FINISH].id)
        if planned or FINISH not in jobs:
            ids = {each.id for each in arrays if each.arm and each.id}
            alive = {job.id.partition("_")[0] for key, job in jobs.items() if key != FINISH}
            new = {array_of(arrays, each.arm, each.seeds[0]) for each in planned}
            ids &= alive | {array.id for array in new if array}
            call = (self._command.finish(), Path())
            self._submit(arrays, "", (0,), [call], f"afterany:{':'.join(sorted(ids))}", 1)
            count += 1
        return arrays, count

    def _submit(
        self,
        arrays: list[JobArray],
        arm: str,
        seeds: tuple[int, ...],
        calls: Sequence[tuple[list[str], Path]],
        dependency: str,
        ranks: int,
    ) -> None:
        """Submit an array and add it to `arrays`, on disk too: before it, and with its id."""
        name = f"{self._command.name}.{arm or 'finish'}.{secrets.token_hex(4)}"
        now = datetime.now().isoformat(timespec="seconds")
        arrays.append(JobArray(name=name, arm=arm, seeds=seeds, submitted=now))
        write_arrays(self._command.folder, arrays)
        python = f"{DEAF_AT_FIRST} {shlex.quote(sys.executable)}"
        executor = self._submitit.SlurmExecutor(_folder(self._command.folder), python=python)
        executor.update_parameters(**self._parameters(name, len(seeds), dependency, ranks))
        words, folders = zip(*calls, strict=True)
        try:
            warning_s = int(self._options.get("signal-delay-s", WARNING_S))
            of_runs = [str(x) if arm else "" for x in folders]
            jobs = executor.map_array(run_job, words, of_runs, [warning_s] * len(words))
        except Exception as error:  # submitit's own type, which must not be imported to be named
            if type(error).__name__ not in ("FailedJobError", "FailedSubmissionError"):
                raise
            raise ValueError(f"sbatch: {error}") from error
        arrays[-1] = replace(arrays[-1], id=jobs[0].job_id.partition("_")[0])
        write_arrays(self._command.folder, arrays)

    def _parameters(self, name: str, count: int, dependency: str, ranks: int) -> dict[str, Any]:
        """Return submitit's parameters of an array of `count` jobs."""
        given = {key: _value(text) for key, text in self._options.items() if key not in OF_SUBMITIT}
        sbatch = {"requeue": True, "kill-on-invalid-dep": "yes", **given}
        sbatch |= tasks_of(ranks, self._options)
        if dependency:
            sbatch["dependency"] = dependency
        own = {
            key.replace("-", "_"): read(self._options[key])
            for key, read in OF_SUBMITIT.items()
            if key in self._options
        }
        # submitit's own would end a job after 5 minutes, and name an account key
        defaults = {"time": None, "wckey": None, "array_parallelism": count}
        return {
            "job_name": name,
            "stderr_to_stdout": True,
            "additional_parameters": sbatch,
            **defaults,
            **own,
        }

    def _printed(self, arrays: list[JobArray], key: Key) -> str:
        array = array_of(arrays, *key)
        if array is None:
            return "it has no job"
        path = _folder(self._command.folder) / f"{array.id_of(key[1])}_0_log.out"
        return f"what it printed is in {path}"


def standing_jobs(arrays: list[JobArray]) -> dict[Key, Standing]:
    """Return the jobs of a study that have not ended, by run; QueueError as `queued`."""
    found = queued([each.name for each in arrays])
    jobs: dict[Key, Standing] = {}
    for array in arrays:
        for seed in array.seeds:
            job = found[array.name].get(array.id_of(seed))
            if job is not None:
                jobs[array.arm, seed] = job
    return jobs


def _with_ids(arrays: list[JobArray]) -> list[JobArray]:
    """Return `arrays` with the ids of those whose submission was cut off; less those that never
    reached the queue.
    """
    found = queued([each.name for each in arrays if not each.id])
    ids = {name: next(iter(jobs)).partition("_")[0] for name, jobs in found.items() if jobs}
    known = [replace(each, id=each.id or ids.get(each.name, "")) for each in arrays]
    return [each for each in known if each.id]


def _look(folder: Path) -> dict[Key, Standing] | None:
    try:
        return standing_jobs(read_arrays(folder))
    except QueueError:  # the controller restarts: the next look tells
        return None


def _folder(study: Path) -> Path:
    """Return where submitit keeps what it submits, and jobs print."""
    return StudyPaths(study).jobs / "slurm"


def _value(text: str) -> str | bool:
    """Return the value of an option of sbatch; True for one without a value, such as exclusive."""
    return True if text.lower() == "true" else text
