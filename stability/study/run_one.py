"""One run of a study, for a scheduler that starts each as a process of its own.

Several such processes may train in one study's folder at once, on one machine or on several that
share a disk. Leaves out what follows the runs: whoever calls `run_study` once all are trained, or
`finish_study`, has it measured.
"""

import time
from dataclasses import replace
from pathlib import Path

from stability.callbacks.study_observer import StudyObserver
from stability.config.convert import nearest
from stability.config.schema import BASELINE
from stability.config.study import StudyConfig
from stability.records.run_lock import is_held
from stability.study.processes import train_in_processes
from stability.study.run import Run, has_ended, reopen
from stability.study.run_study import check_study, plan_study, sealed_under
from stability.study.storage import baselines_to_restore
from stability.study.train_run import TrainOptions

__all__ = ["run_one"]

PATIENCE_S = 90.0
"""How long to wait for a process that holds the run: one that a scheduler has killed may take as
long to die, and its lease on another machine stands for a minute."""
PAUSE_S = 0.5


def run_one(
    study: StudyConfig,
    out: Path,
    arm: str,
    seed: int,
    *,
    options: TrainOptions,
    observer: StudyObserver,
) -> Run:
    """Train the run of `arm` with `seed`, or go on with it, in a fresh process; return the run.

    One that has ended is kept. How it ended is in its manifest. ValueError for an arm or seed that
    the study has not, for a candidate whose baseline is not trained, and as `run_study`.
    """
    runs = plan_study(study, out)
    run = _find(study, runs, arm, seed)
    if run.baseline is not None and not has_ended(run.baseline):
        is_training = is_held(run.baseline)
        raise ValueError(
            f"run: the {BASELINE} of seed {seed} must have been trained before {arm}, "
            f"{'is in training' if is_training else 'is not'}; "
            f"{'wait for it' if is_training else f'--only {BASELINE} --seed {seed} trains it'}"
        )
    _wait_for(run, observer)
    _refuse_dropped(runs, run)
    damaged = check_study([run], isolated=True)
    run = replace(run, protocol=sealed_under(study, out, runs))
    for _, found in damaged:
        reopen(run, found, observer)
    train_in_processes([run], 1, options, observer)
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
