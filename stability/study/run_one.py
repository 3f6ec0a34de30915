"""One run of a study, for a scheduler that starts each as a process of its own.

Several such processes may train in one study's folder at once, on one machine or on several that
share a disk. A run over ranks may have a process for each rank, which `follow_one` is for all but
the first. Where the study drops what need not stay, the process that trained a run does so once it
can (`settle`). Leaves out what else follows the runs: whoever calls `run_study` once all are
trained, or `finish_study`, has it measured.
"""

import os
import time
from dataclasses import replace
from pathlib import Path

from stability.callbacks.study_observer import StudyObserver
from stability.config.convert import nearest
from stability.config.diff import hash_without
from stability.config.schema import BASELINE
from stability.config.study import StudyConfig
from stability.model.ranks import is_lost_connection
from stability.records.run_lock import is_held
from stability.study.processes import train_in_processes, train_one_rank
from stability.study.rank_tasks import RankTask, failure_of, meeting
from stability.study.run import Run, has_ended, needs_no_training, reopen
from stability.study.run_study import check_study, plan_study, sealed_under
from stability.study.settle import settle_ended
from stability.study.storage import baselines_to_restore
from stability.study.train_run import TrainOptions

__all__ = ["follow_one", "run_one"]

PATIENCE_S = 90.0
"""How long to wait for a process that holds the run: one that a scheduler has killed may take as
long to die, and its lease on another machine stands for a minute."""
PAUSE_S = 0.5
TRAIN, KEPT, ENDED_WELL = "train", "kept", "ended well"
"""What the first task of a run says to the others."""


def run_one(
    study: StudyConfig,
    out: Path,
    arm: str,
    seed: int,
    *,
    options: TrainOptions,
    observer: StudyObserver,
    task: RankTask | None = None,
) -> Run:
    """Train the run of `arm` with `seed`, or go on with it, in a fresh process; return the run.

    One that has ended is kept. How it ended is in its manifest. With a `task`, which is the first
    one, the others train the other ranks. ValueError for an arm or seed that the study has not, for
    a candidate whose baseline is not trained, for another number of tasks than the run has ranks,
    and as `run_study`.
    """
    runs = plan_study(study, out)
    run = _find(study, runs, arm, seed)
    if task is None:
        run = _checked(study, out, runs, run, observer)
        train_in_processes([run], 1, options, observer)
    else:
        run = _train_with_others(study, out, runs, run, task, options, observer)
    if study.keep != "all":
        settle_ended(runs, study.keep, observer, seed)
    return run


def _train_with_others(
    study: StudyConfig,
    out: Path,
    runs: list[Run],
    run: Run,
    task: RankTask,
    options: TrainOptions,
    observer: StudyObserver,
) -> Run:
    """Train the first rank of `run` in this task, whose others train the other ranks."""
    task.check(run.config.parallel.ranks)
    parallel = run.config.parallel
    if options.check_observer and parallel.shard * parallel.tensor > 1:
        raise ValueError(
            "run: check-observer must be left out where each rank of a run that shares its weights "
            "is a task: it writes into a folder that only one machine sees; without tasks, all "
            "ranks on one machine, it can be asked"
        )
    with meeting(task, os.environ) as met:
        run = _checked(study, out, runs, run, observer, here=1)
        if needs_no_training(run, observer):
            met.start(KEPT, _name_of(run))
            met.tell("end", ENDED_WELL)
            return run
        met.start(TRAIN, _name_of(run))
        train_one_rank(run, options, observer, met)
        met.tell("end", ENDED_WELL if has_ended(run.paths) else "failed")
    return run


def follow_one(
    study: StudyConfig,
    out: Path,
    arm: str,
    seed: int,
    *,
    options: TrainOptions,
    observer: StudyObserver,
    task: RankTask,
) -> bool:
    """Train this task's rank of the run of `arm` with `seed`; return whether the run has ended.

    What else there is to do, the first task does. ValueError as `run_one`.
    """
    run = _find(study, plan_study(study, out), arm, seed)
    task.check(run.config.parallel.ranks)
    with meeting(task, os.environ) as met:
        if met.started(_name_of(run)) == TRAIN:
            for rank, text in train_one_rank(run, options, observer, met):
                if not is_lost_connection(text):
                    met.tell(failure_of(rank), text)
        return met.hear("end") == ENDED_WELL


def _name_of(run: Run) -> str:
    """Return what tells a run from others, whose tasks may meet at the same place by mistake."""
    return f"{run.study}, {run.arm.name}, seed {run.seed}, {hash_without(run.config, {})[:16]}"


def _checked(
    study: StudyConfig,
    out: Path,
    runs: list[Run],
    run: Run,
    observer: StudyObserver,
    *,
    here: int = 0,
) -> Run:
    """Return `run` as it is to be trained, once nothing speaks against it; seal the plan.

    `here` is how many of its ranks train on this machine, 0 for all.
    """
    if run.baseline is not None and not has_ended(run.baseline):
        is_training = is_held(run.baseline)
        alone = f"--only {BASELINE} --seed {run.seed}"
        raise ValueError(
            f"run: the {BASELINE} of seed {run.seed} must have been trained before {run.arm.name}, "
            f"{'is in training' if is_training else 'is not'}; "
            f"{'wait for it' if is_training else f'{alone} trains it'}"
        )
    _wait_for(run, observer)
    _refuse_dropped(runs, run)
    damaged = check_study([run], isolated=True, here=here)
    run = replace(run, protocol=sealed_under(study, out, runs))
    for _, found in damaged:
        reopen(run, found, observer)
    return run


def _refuse_dropped(runs: list[Run], run: Run) -> None:
    """ValueError if `run` has to train, and its baseline's snapshots were dropped."""
    if not has_ended(run.paths) and baselines_to_restore(runs, {run.paths}):
        raise ValueError(
            f"run: the {BASELINE} of seed {run.seed} must have its snapshots, which keep dropped; "
            "`stability run` without --only trains it anew first"
        )


def _find(study: StudyConfig, runs: list[Run], arm: str, seed: int) -> Run:
    names = list(dict.fromkeys(run.arm.name for run in runs))
    if arm not in names:
        raise ValueError(
            f"run: only must be one of the study's {len(names)} arms, got {arm!r}; nearest: "
            f"{nearest(arm, names)}"
        )
    found = [run for run in runs if run.arm.name == arm and run.seed == seed]
    if not found:
        seeds = ", ".join(map(str, study.seeds))
        raise ValueError(f"run: seed must be one of the study's, got {seed}; it has {seeds}")
    return found[0]


def _wait_for(run: Run, observer: StudyObserver) -> None:
    """Wait until no process holds the run, PATIENCE_S at most: training then says who does."""
    end, is_told = time.monotonic() + PATIENCE_S, False
    while is_held(run.paths) and time.monotonic() < end:
        if not is_told:
            observer.run_noted(run.arm.name, run.seed, "another process holds this run; waiting")
        is_told = True
        time.sleep(PAUSE_S)
