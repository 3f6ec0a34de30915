"""Where every run of a study stands: by its records, and by the queue if it has a job there.

Leaves out how that is shown.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from stability.execute.job_record import read_arrays
from stability.execute.ray_tasks import ray_jobs
from stability.execute.slurm import standing_jobs
from stability.execute.slurm_queue import QueueError
from stability.execute.standing import FINISH, Key, Standing
from stability.records.log_tail import last_logged
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_names import TRAIN_LOSS
from stability.records.paths import RunPaths
from stability.records.run_lease import holder
from stability.records.run_lock import is_held
from stability.records.study_file import read_study_file

__all__ = ["RunStatus", "StudyStatus", "study_status"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One run of a study, or the job that follows them, whose arm is empty."""

    arm: str
    seed: int
    state: str
    """`finished`, `diverged`, `failed` and `interrupted` as in the manifest; `training`; `queued`;
    `starting`, if its job runs and it doesn't train yet; `stopped`, if it was killed; `waiting`."""
    step: int
    until: int
    job: str = ""
    node: str = ""
    since: str = ""
    """When it came into this state, in ISO 8601, as far as that is known."""
    message: str = ""
    """Why it has failed, or what it waits for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyStatus:
    """All runs of a study."""

    name: str
    folder: str
    runs: tuple[RunStatus, ...]
    trouble: str = ""
    """Why the queue can't be asked; empty if it was."""


def study_status(folder: Path) -> StudyStatus:
    """Return where the runs of the study in a folder stand, in the order of seeds and arms.

    ValueError, which names the file, if `study.json` is missing or damaged.
    """
    planned = read_study_file(folder)
    jobs, trouble = _jobs(folder)
    steps = planned.config["base"]["train"]["steps"]
    runs = [
        _status(folder, arm["name"], seed, arm.get("until", steps), jobs.get((arm["name"], seed)))
        for seed in planned.config["seeds"]
        for arm in planned.arms
    ]
    if FINISH in jobs:
        job = jobs[FINISH]
        runs.append(_of_job(RunStatus(arm="", seed=0, state="", step=0, until=0), job))
    return StudyStatus(
        name=planned.config["name"], folder=str(folder), runs=tuple(runs), trouble=trouble
    )


def _jobs(folder: Path) -> tuple[Mapping[Key, Standing], str]:
    """Return the jobs of a study that have not ended, and why not all are known."""
    arrays = read_arrays(folder)
    try:
        of_slurm = standing_jobs(arrays) if arrays else {}
    except QueueError as error:
        return {}, str(error)
    of_ray = ray_jobs(folder)
    if of_ray is None:
        return of_slurm, "Ray can't be asked: its cluster, or the package, is not here"
    return of_slurm | of_ray, ""


def _status(folder: Path, arm: str, seed: int, until: int, job: Standing | None) -> RunStatus:
    paths = RunPaths.for_run(folder, arm, seed)
    blank = RunStatus(arm=arm, seed=seed, state="waiting", step=0, until=until)
    if not paths.manifest.exists():
        return _of_job(blank, job) if job else blank
    try:
        manifest = read_manifest(paths.manifest)
    except ValueError as error:
        return RunStatus(
            arm=arm, seed=seed, state="damaged", step=0, until=until, message=str(error)
        )
    return _of_record(paths, manifest, until, job)


def _of_record(paths: RunPaths, manifest: Manifest, until: int, job: Standing | None) -> RunStatus:
    """Return what the records of a run say, and its job if it has not ended."""
    logged = last_logged(paths.metrics, TRAIN_LOSS)
    # the manifest's step is that of its last snapshot: the log is ahead of it
    step = max(manifest.step, logged[0] if logged else 0)
    files = [paths.manifest]
    if manifest.state in ENDED and paths.metrics.exists():
        # a manifest is written again when snapshots are dropped or faults were planted; a log isn't
        files.append(paths.metrics)
    written = datetime.fromtimestamp(min(path.stat().st_mtime for path in files))
    told = {"arm": paths.arm, "seed": paths.seed, "step": step, "until": until}
    since = written.isoformat(timespec="seconds")
    if manifest.state in ENDED:
        return RunStatus(**told, state=manifest.state, since=since, message=manifest.message)
    if is_held(paths):
        host, began = holder(paths)
        return RunStatus(
            **told,
            state="training",
            job=job.id if job else "",
            node=(job and job.node) or host,
            since=datetime.fromtimestamp(began).isoformat(timespec="seconds") if began else "",
        )
    if job is not None:
        return _of_job(RunStatus(**told, state=""), job)
    state = "stopped" if manifest.state == "running" else manifest.state
    return RunStatus(**told, state=state, since=since, message=manifest.message)


def _of_job(run: RunStatus, job: Standing) -> RunStatus:
    return RunStatus(
        arm=run.arm,
        seed=run.seed,
        step=run.step,
        until=run.until,
        state="queued" if job.state == "queued" else "starting",
        job=job.id,
        node=job.node,
        since=job.since,
        message=job.reason,
    )
