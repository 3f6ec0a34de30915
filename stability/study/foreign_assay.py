"""Plants known faults on the candidate of a command: the command is run again, for a few updates.

In its process the faults are planted (`planting`), on the batches of these updates and at the run's
own snapshots; the run itself stays as it is on record. Faults that are neither found
nor surely missed at FIRST_LOOKS are planted once more, on more batches. The updates must be the
run's first ones, bit for bit: start, batches, and what decides the bits. What could not be planted
is on record with its reason, and tried again with the next call of `stability run` or `record`.

Leaves out which candidates are assayed (`assays`) and what counts as found (`analysis.assay`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stability.analysis.assay import faults_due, is_settled, why_unplanted
from stability.analysis.study_records import read_study
from stability.config.commands import filled_in
from stability.config.convert import to_dict
from stability.config.study import PolicyConfig
from stability.probe.planted_faults import MOST
from stability.recorder.launch import environment_of, launch
from stability.recorder.spool_tail import SpoolTail
from stability.recorder.spooled import Spooled, read_spool
from stability.recorder.writer import running_hashes
from stability.records.assay import AssayRecord, FaultRecord, fault_of, sources_of, unplanted
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.study.assays import Assayed, looks_at, parents_of, steps_of, update
from stability.study.foreign import died, spool_below, variables_of
from stability.study.foreign_plan import ForeignRun
from stability.study.given_start import start_variables
from stability.study.measuring_cost import USUAL, WIDER, in_mean_updates, is_assayed
from stability.study.run import locked

__all__ = [
    "FIRST_LOOKS",
    "LOOK_GRADIENTS",
    "assay_commands",
    "assay_recorded",
    "planted_on",
    "planted_updates",
]

_PLANTING = "stability.study.planting"
"""What the script's process loads; by name, since it needs torch, and this one does not."""

Advanced = Callable[[str, int, int, str], None]
"""Told of an arm how many of at most so many updates, or looks, are made."""

LOOK_GRADIENTS = 6
"""Gradients that a look of a command's probe computes: three attentions', isolated and trained."""
FIRST_LOOKS = 24
"""Looks that settle most faults; MOST of them would have every script run four times as long."""


def assay_commands(
    runs: Sequence[ForeignRun],
    folders: Mapping[str, Path | None],
    policy: PolicyConfig,
    note: Callable[[str, int, str], None],
    tell: Callable[[str], None],
    advanced: Advanced = lambda arm, done, most, what: None,
    planned: Callable[[Sequence[str]], None] = lambda arms: None,
) -> list[AssayRecord]:
    """Assay each candidate of `runs` that needs it, as `assays.update`.

    `runs` are of one seed, the study's first. `folders` says where an arm's command runs, and
    `advanced` is told how far it is.
    """
    assayed = [
        Assayed(
            arm=run.arm,
            role=run.role,
            seed=run.seed,
            paths=run.paths,
            measure=partial(_assay, run, folders[run.arm], tell, partial(advanced, run.arm)),
            cost=f": its command runs again, for up to {FIRST_LOOKS} updates",
        )
        for run in runs
        # of one that swaps no attention, or is not looked at as needed, the config says so
        if run.asked.attention and not why_unplanted(run.config)
    ]
    return update(runs[0].folder, assayed, policy, note, tell, planned) if assayed else []


def planted_on(runs: Sequence[ForeignRun]) -> list[ForeignRun]:
    """Return the runs of a study that faults are planted on, if none fails: the first seed's."""
    first = [run for run in runs if run.seed == runs[0].seed]
    if not any(run.role == "broken" for run in first):
        return []
    named = runs[0].policy["candidates"]
    return [
        run
        for run in first
        if is_assayed(run.arm, run.role, named)
        and run.asked.attention
        and not why_unplanted(run.config)
    ]


def planted_updates(runs: Sequence[ForeignRun]) -> dict[tuple[str, int], float]:
    """Return of each of these how many of its updates, with their looks, usually take as long."""
    return {
        (run.arm, run.seed): min(FIRST_LOOKS, run.asked.steps)
        + USUAL * in_mean_updates(WIDER, LOOK_GRADIENTS * WIDER, run.asked.probe["gradient_every"])
        for run in planted_on(runs)
    }


def assay_recorded(run: ForeignRun, tell: Callable[[str], None]) -> None:
    """Assay a run that is on record, where its study has an arm that is broken on purpose."""
    study = read_study(run.folder)
    if run.seed == next(iter(study.seeds)) and any(arm.role == "broken" for arm in study.arms):
        assay_commands(
            [run], {run.arm: None}, study.policy, lambda arm, seed, said: tell(f"  {said}"), tell
        )


def _assay(
    run: ForeignRun,
    folder: Path | None,
    tell: Callable[[str], None],
    advanced: Callable[[int, int, str], None],
    policy: PolicyConfig,
) -> AssayRecord:
    """Return what each planted fault shows on the candidate of `run`, or why none was planted."""
    manifest = read_manifest(run.paths.manifest)
    plant = partial(_planted, run, manifest, folder, policy, advanced)
    try:
        own, faults = plant(list(faults_due("")), FIRST_LOOKS)
    except (ValueError, OSError) as error:
        own, faults = unplanted(str(error)), ()
    else:
        own, faults = _looked_closer(run.arm, manifest.step, policy, plant, tell, own, faults)
    return AssayRecord(
        arm=run.arm,
        seed=run.seed,
        parents=parents_of(run.paths),
        own=own,
        faults=faults,
        sources=sources_of(manifest.resolved, manifest.environment),
    )


def _looked_closer(
    arm: str,
    steps: int,
    policy: PolicyConfig,
    plant: Callable[[Sequence[str], int], tuple[FaultRecord, tuple[FaultRecord, ...]]],
    tell: Callable[[str], None],
    own: FaultRecord,
    faults: tuple[FaultRecord, ...],
) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
    """Return the figures, with those of more looks for each fault of a run that is not settled.

    The run has so many `steps`.
    """
    is_open = [
        fault.name
        for fault in faults
        if "gradient" in fault.levels and not is_settled(policy, fault)
    ]
    # there are more batches to look at only where the run has more updates
    if own.error or not is_open or steps <= FIRST_LOOKS:
        return own, faults
    tell(
        f"{', '.join(is_open)} on {arm}: neither found nor surely missed at {FIRST_LOOKS} looks, "
        f"so its command runs once more, for up to {min(MOST, steps)} updates"
    )
    try:
        failed, again = plant(is_open, MOST)
        if failed.error:
            raise ValueError(failed.error)
    except (ValueError, OSError) as error:
        said = str(error)
        return own, tuple(
            replace(fault, error=said) if fault.name in is_open else fault for fault in faults
        )
    closer = {fault.name: fault for fault in again}
    return own, tuple(closer.get(fault.name, fault) for fault in faults)


def _planted(
    run: ForeignRun,
    manifest: Manifest,
    folder: Path | None,
    policy: PolicyConfig,
    advanced: Callable[[int, int, str], None],
    names: Sequence[str],
    looks: int,
) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
    """Run the command again, and return what it has told of the faults; ValueError if it can't."""
    steps = steps_of(run.paths)
    if not steps:
        raise ValueError(f"{run.paths.root} must have a snapshot after step 0, has none")
    updates = min(looks, manifest.step)
    planting = {
        "instrument": _PLANTING,
        "snapshots": [str(run.paths.held_snapshot(step).resolve()) for step in steps],
        "policy": to_dict(policy),
        "faults": list(names),
        "looks": looks,
        # what was not settled at its first looks is not tried there again
        "after": FIRST_LOOKS if looks > FIRST_LOOKS else 0,
    }
    asked = replace(
        run.asked,
        steps=updates,
        snapshot_steps=(updates,),
        held_out="none",
        probe={**run.asked.probe, **planting},
    )
    with locked(run.paths), spool_below(run.paths.root) as spool:
        values = {"seed": run.seed, "arm": run.arm, "out": spool}
        variables = {
            **environment_of(asked, variables_of(run)),
            **start_variables(run, spool),
            "WANDB_MODE": "disabled",  # it is no training of the user's that W&B should list
            "STABILITY_SPOOL": str(spool),
        }
        words = [filled_in(word, values) for word in run.words]
        launched = launch(
            *(words, variables),
            folder=folder,
            output=spool / "output.txt",
            meanwhile=partial(_tell_of_newest, SpoolTail(spool), updates, advanced),
        )
        if launched.code:
            raise ValueError(died(launched, spool))
        spooled = read_spool(spool)
    _check_is_own(run, manifest, spooled)
    if not spooled.assay:
        raise ValueError("the command ended without a word on the faults")
    return _told(spooled.assay, names)


def _tell_of_newest(
    tail: SpoolTail, updates: int, advanced: Callable[[int, int, str], None]
) -> None:
    """Tell of the newest look, or update, that came into the spool since the last call."""
    for line in reversed(tail.new_lines()):
        if line.get("kind") == "planted":
            advanced(line["done"], line["most"], looks_at(line["faults"]))
            return
        if line.get("kind") == "update":
            advanced(line["step"], updates, "updates")
            return


def _told(
    assay: Mapping[str, Any], names: Sequence[str]
) -> tuple[FaultRecord, tuple[FaultRecord, ...]]:
    """Return the figures of the candidate and its faults from their JSON values; ValueError else.

    All of `names` must be there, unless none could be planted.
    """
    own, *faults = map(fault_of, (assay["own"], *assay["faults"]))
    told = [fault.name for fault in faults]
    if not own.error and told != list(names):
        raise ValueError(f"the command must tell of {', '.join(names)}, has told of {told}")
    return own, tuple(faults)


def _check_is_own(run: ForeignRun, manifest: Manifest, spooled: Spooled) -> None:
    """ValueError unless the updates are the run's own: start, batches, what decides the bits."""
    if spooled.init != manifest.hashes.get("init_weights"):
        raise ValueError(f"{run.arm}, run again, must start as on record, has other start weights")
    buffers = manifest.resolved.get("start_parts", {}).get("buffers", {})
    if spooled.start_parts.get("buffers", {}) != buffers:
        raise ValueError(f"{run.arm}, run again, must start as on record, has other buffers")
    known = read_text(run.paths.metrics, BATCH_HASH)
    for step, found in enumerate(running_hashes(u.batch for u in spooled.updates), start=1):
        if not found or known.get(step) != found:
            raise ValueError(
                f"{run.arm}, run again, must be given the batches on record, batch {step} is "
                f"{'another' if found else 'not seen'}"
            )
    now = {**spooled.environment, **{f"module.{x}": sha for x, sha in spooled.modules.items()}}
    other = [name for name, value in now.items() if manifest.environment.get(name, value) != value]
    if other:
        raise ValueError(
            f"{run.arm}, run again, must have the {other[0]} that it was trained with, has "
            f"another now; restore it, or move {run.paths.root} away to record it anew"
        )
