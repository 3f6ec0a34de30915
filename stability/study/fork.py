"""Forks: a run that starts from another run's exact state and differs from it in one axis.

Weights, optimizer, loss scaler, loader position and every running sum are those of the parent's
checkpoint, so a fork that changes nothing ends in the parent's bits. Its records begin with the
parent's, less the drifts, which were measured from another run. The training itself is left to
`train_run`, the search over many forks to `bisect`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from stability.analysis.drift_parents import check_drifts, parents_by_line
from stability.analysis.pair_contract import axis_of, pair_breach
from stability.analysis.witness_contract import testimony_of
from stability.callbacks.study_observer import StudyObserver
from stability.config.arms import Arm, override
from stability.config.axes import touches
from stability.config.convert import from_dict
from stability.config.diff import diff
from stability.config.schema import ArmConfig
from stability.records.events import read_log_and_events
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_names import drift_name
from stability.records.paths import RunPaths
from stability.records.run_files import checkpoint_of, file_damage
from stability.study.assemble import assemble
from stability.study.foreign_plan import ForeignRun
from stability.study.fork_folder import fork_name, fork_place
from stability.study.fresh_process import call_alone, call_for
from stability.study.processes import train_in_processes
from stability.study.run import Fork, Run, check_existing, has_ended, reopen
from stability.study.size_check import check_memory
from stability.study.train_run import TrainOptions, train

__all__ = ["fork_drifts", "plan_fork", "run_fork"]

_BEGIN = "it only decides how a run begins"
_STATE = "its state would be another's"
SETTLED = {
    "model.init": _BEGIN,
    "model.init_std": _BEGIN,
    "seed.init_offset": _BEGIN,
    "nudge": _BEGIN,
    "start": _BEGIN,
    "model.qk_norm": "the checkpoint has the weights of its own model",
    "optimizer.name": _STATE,
    "optimizer.options": _STATE,
}
"""What a fork can no longer change, and why."""


def plan_fork(
    parent: RunPaths, at: int, changes: Mapping[str, Any], *, name: str = "", until: int = 0
) -> Run:
    """Return the run that continues `parent` from step `at` with `changes` to its config.

    `changes` are nested as in an arm of a study. It trains up to step `until`, 0 being the parent's
    last. Its folder is `forks/<name>/seed-<n>` in the parent's study. Where the checkpoint was
    dropped it is to be planned again, from what `retrain` returns. ValueError for a run that does
    not exist, a step without a whole checkpoint, an axis that is settled at the start, several
    axes, an end before the fork, or more than this machine's memory.
    """
    manifest = read_manifest(parent.manifest)
    config = from_dict(ArmConfig, manifest.config, str(parent.manifest))
    _check_step(parent, manifest, at)
    last = config.train.steps
    if at >= last:
        raise ValueError(f"fork: at must be a step before the run's last, {last}, got {at}")
    until = until or last
    if not at < until <= last:
        raise ValueError(f"fork: until must be from {at + 1} to {last}, got {until}")
    changed = override(config, changes, where="fork")
    # where the parent changes a part of the attention, the rest stays its baseline's
    if changed.attention != config.attention and not config.attention.is_partial:
        probe = replace(changed.probe, shadows=(config.attention,), shadows_are="baseline")
        changed = replace(changed, probe=probe)
    arm = Arm(
        name=name
        or fork_name(f"{parent.arm}.at-{at}.to-{until}", changes, [parent.arm, at, until, changes]),
        config=changed,
        diff=diff(config, changed),
        role="candidate",
        until=until,
    )
    axis = axis_of(arm)
    for path, reason in SETTLED.items():
        if touches(arm.diff, (path,)):
            raise ValueError(f"fork: {path} must not change, {reason}; make it an arm of the study")
    run = Run(
        study=manifest.study,
        arm=arm,
        axis=axis,
        seed=manifest.seed,
        paths=RunPaths.for_run(fork_place(parent), arm.name, manifest.seed),
        baseline=parent,
        fork=Fork(at=at, until=until),
    )
    try:
        check_memory([run])  # before the model is built
        call_for(changed, _check_parts, changed)
    except ValueError as error:
        raise ValueError(f"fork: {parent.root}: {error}") from error
    return run


def _check_parts(config: ArmConfig) -> None:
    assemble(config)


def run_fork(
    run: Run, options: TrainOptions, observer: StudyObserver, *, isolated: bool = True
) -> Manifest:
    """Train a planned fork, or resume it, in a fresh process; one that has ended is kept.

    So is a run without a parent, which is trained by itself. Not `isolated`, it trains in this
    process, as `run_study`. RunConflictError if its folder holds another run.
    """
    damaged = call_for(run.config, check_existing, run) if isolated else check_existing(run)
    if damaged:
        reopen(run, damaged, observer)
    if has_ended(run.paths):
        observer.run_ended(run.arm.name, run.seed, "finished", "kept")
        return read_manifest(run.paths.manifest)
    if run.config.parallel.ranks > 1:
        train_in_processes([run], 1, options, observer)
        return read_manifest(run.paths.manifest)
    observer.run_started(1, 1, run.arm.name, run.seed, run.last_step)
    if isolated:
        manifest = call_alone(train, run, options, observer=observer)
    else:
        manifest = train(run, options, observer)
    observer.run_ended(run.arm.name, run.seed, manifest.state, manifest.message)
    return manifest


def fork_drifts(run: Run | ForeignRun, metric: str = "rel_l2") -> dict[int, float]:
    """Return how far a fork is from its parent, by step.

    ValueError where the parent has been trained anew: the fork left another run than that one.
    """
    assert run.baseline is not None
    forked, parent = ((paths, read_manifest(paths.manifest)) for paths in (run.paths, run.baseline))
    content, _ = read_log_and_events(run.paths.metrics)
    found = check_drifts(content.metrics, parents_by_line(content.kept), forked, parent)
    said = pair_breach(testimony_of(*parent), testimony_of(*forked), forked[1].diff)
    if found.stale:
        said = f"drift at step {min(found.stale)}: {found.stale[min(found.stale)]}"
    if said:
        raise ValueError(
            f"{run.paths.root}: is no fork of {run.baseline.root} as it is now: {said}; give "
            "--name, or move the fork's folder away, to make it anew"
        )
    series = found.metrics.get(drift_name("all", metric))
    return dict(zip(series.steps, series.values, strict=True)) if series else {}


def _check_step(parent: RunPaths, manifest: Manifest, at: int) -> None:
    path = checkpoint_of(parent, manifest, at)
    if parent.name_of(path) not in manifest.all_files:
        folder = f"{parent.name_of(parent.checkpoints_dir)}/"
        had = sorted(name for name in manifest.all_files if name.startswith(folder))
        steps = ", ".join(str(int(Path(name).stem.removeprefix("step-"))) for name in had)
        raise ValueError(
            f"fork: at must be a step with a checkpoint, got {at}; {parent.root} has "
            f"{steps or 'none'} (train.keep_checkpoints: 0 keeps all)"
        )
    if parent.name_of(path) in manifest.dropped:
        return
    wrong = file_damage(parent, manifest, path)
    if wrong:
        raise ValueError(f"fork: {path} {wrong}")
