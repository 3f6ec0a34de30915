"""Trains a run anew whose snapshots or checkpoints were dropped, and proves that it is the same.

A fork, a bisection and a waterfall need weights or a state that a study's `keep` has dropped. The
run is trained once more from its own config, in a folder of its own beside the study's forks,
`forks/<arm>/seed-<n>`, and the records that it stands for are not touched. It counts only if each
snapshot has the checksum that the manifest of the first one lists. It is measured from no baseline,
whose snapshots may be gone as well. Leaves out who needs it and when files are dropped (`storage`).
"""

from dataclasses import replace
from typing import get_args

from stability.analysis.pair_contract import start_breach
from stability.callbacks.study_observer import StudyObserver
from stability.config.arms import Arm
from stability.config.commands import is_command
from stability.config.convert import from_dict
from stability.config.schema import BASELINE, ArmConfig, Role
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.paths import RunPaths
from stability.study.fork import run_fork
from stability.study.fork_folder import fork_place
from stability.study.run import Run
from stability.study.size_check import check_disk, check_memory
from stability.study.train_run import TrainOptions

__all__ = ["plan_retraining", "retrain"]

_WANTED = "{what} was dropped by the study's keep: it is trained anew, {updates}, in {folder}"


def plan_retraining(known: RunPaths) -> Run:
    """Return the run that trains `known` once more, in `forks/<arm>/seed-<n>`; writes nothing.

    ValueError for the run of a command, and for more than this machine's memory or disk.
    """
    manifest = read_manifest(known.manifest)
    if is_command(manifest.config):
        raise ValueError(
            f"{known.root}: must be a run of our own trainer to be trained anew, is one of a "
            "command; run the command again in another folder"
        )
    config = from_dict(ArmConfig, manifest.config, str(known.manifest))
    arm = Arm(
        name=manifest.arm,
        config=config,
        diff={path: (was, now) for path, (was, now) in manifest.diff.items()},
        role=next((role for role in get_args(Role) if role == manifest.role), "candidate"),
        until=manifest.until or config.train.steps,
    )
    run = Run(
        study=manifest.study,
        arm=arm,
        axis=manifest.axis,
        seed=manifest.seed,
        paths=RunPaths.for_run(fork_place(known), manifest.arm, manifest.seed),
        baseline=None,
        protocol=manifest.hashes.get("protocol", ""),
    )
    try:
        check_memory([run])
        check_disk([run], known.root.parent.parent)
    except ValueError as error:
        raise ValueError(f"{known.root}: can't be trained anew: {error}") from error
    return run


def retrain(
    known: RunPaths, what: str, observer: StudyObserver, *, isolated: bool = True
) -> RunPaths:
    """Train `known` anew, or go on with it, and return the paths of a run with the same snapshots.

    One that was trained anew before is kept. `what` of it was dropped, e.g. "its checkpoint of step
    20", of which `observer` is told. ValueError as `plan_retraining`, where the training fails, and
    where it ends in other bits; RunConflictError if the folder holds another run.
    """
    run = plan_retraining(known)
    was_there = run.paths.manifest.exists()
    updates = f"{run.last_step} updates"
    said = _WANTED.format(what=what, updates=updates, folder=run.paths.root)
    observer.run_noted(run.arm.name, run.seed, said)
    found = run_fork(run, TrainOptions(wandb_mode="disabled"), observer, isolated=isolated)
    if found.state not in ENDED:
        raise ValueError(f"{run.paths.root}: {found.state}: {found.message}")
    other = _other_bits(read_manifest(known.manifest), found)
    if other:
        hope = (
            f"move {run.paths.root} away to try once more"
            if was_there
            else (f"what was dropped can't be had here, and {run.paths.root} is another run")
        )
        raise ValueError(f"{known.root}: trained anew it ends in other bits: {other}; {hope}")
    return run.paths


def _other_bits(known: Manifest, anew: Manifest) -> str:
    """Return what a run that was trained anew has otherwise than the first one; empty if nothing.

    A cause comes before what it leads to: another machine or version, then other weights.
    """
    snapshots = {x: sha for x, sha in known.all_files.items() if x.startswith("snapshots/")}
    other = [name for name, sha in snapshots.items() if anew.files.get(name) != sha]
    if not other:
        return ""
    # the two are one run: what a pair may differ in is nothing
    breach = start_breach(known, replace(anew, diff={}), {})
    said = breach.removeprefix("no pair: ").replace(f"the {BASELINE}'s", "the first one's")
    return said or f"{other[0]} is another file"
