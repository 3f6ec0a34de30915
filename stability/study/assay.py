"""Plants known faults on a trained candidate of ours, and measures what the evidence makes of each.

After a candidate's run of the first seed, its snapshots are loaded again and the run's own batches
go forward and backward through the model (`probe.planted_faults`). At 64-true, where the golden's
gradient is no finer than the candidate's, faults are planted at the operator alone.

Only a study with an arm of role `broken` is assayed: without one nothing can pass anyway. Leaves
out the file (`records.assay`), what counts as found (`analysis.assay`), and when it is done
(`assays`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from stability.analysis.assay import faults_due, is_settled
from stability.callbacks.study_observer import StudyObserver
from stability.config.axes import touches
from stability.config.schema import ArmConfig
from stability.config.study import PolicyConfig
from stability.probe.gradient_evidence import AttentionRole
from stability.probe.planted_faults import MOST, FaultLook, Plant, distinct_looks, plant_faults
from stability.records.assay import AssayRecord, sources_of
from stability.records.identity import environment
from stability.records.manifest import read_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import read_run_snapshot, snapshot_of
from stability.study.assays import Assayed, looks_at, parents_of, steps_of, update
from stability.study.assemble import assemble, load_data, resolve_device
from stability.study.fresh_process import call_alone
from stability.study.measuring_cost import USUAL, WIDER, in_mean_updates, is_assayed
from stability.study.model_gradients import ModelGradients, attention_rounding, attentions_of_arm
from stability.study.retrain import retrain
from stability.study.run import Run

__all__ = [
    "LOOK_GRADIENTS",
    "assay_run",
    "assay_whole_run",
    "gradient_updates",
    "planted_on",
    "planted_updates",
    "update_assays",
]

SEQUENCES = 4
"""Of a batch, as many as take part in a gradient, and half of them at the operator: a fault is a
thousand roundings large there, and time is what an assay costs."""
LOOK_GRADIENTS = 3
"""Gradients that most looks of a run's probe compute: three attentions', isolated."""


def update_assays(
    study: Path,
    runs: Sequence[Run],
    policy: PolicyConfig,
    note: Callable[[str, int, str], None],
    tell: Callable[[str], None] = lambda text: None,
    *,
    planned: Callable[[Sequence[str]], None] = lambda arms: None,
    measure: Callable[[Run, PolicyConfig], AssayRecord | None] | None = None,
) -> list[AssayRecord]:
    """Assay each candidate of the first seed that needs it, as `assays.update`.

    Nothing is done in a study without an arm that is broken on purpose. `measure` is `assay_run`,
    or that in a process of its own.
    """
    first = [run for run in runs if run.seed == runs[0].seed]
    if not any(run.arm.role == "broken" for run in first):
        return []
    assayed = [
        Assayed(
            arm=run.arm.name,
            role=run.arm.role,
            seed=run.seed,
            paths=run.paths,
            measure=partial(measure or assay_run, run),
            precision=run.config.precision,
        )
        for run in first
        if run.config.probe.shadows_are == "baseline"  # else it is no attention
    ]
    return update(study, assayed, policy, note, tell, planned)


def planted_on(runs: Sequence[Run], policy: PolicyConfig) -> list[Run]:
    """Return the runs of a study that faults are planted on, if none fails: the first seed's."""
    first = [run for run in runs if run.seed == runs[0].seed]
    if not any(run.arm.role == "broken" for run in first):
        return []
    return [
        run
        for run in first
        if is_assayed(run.arm.name, run.arm.role, policy.candidates)
        and touches(run.arm.diff, ("attention",))
        and run.config.probe.shadows_are == "baseline"
    ]


def planted_updates(runs: Sequence[Run], policy: PolicyConfig) -> dict[tuple[str, int], float]:
    """Return of each of these how many of its updates, with their looks, usually take as long."""
    return {
        (run.arm.name, run.seed): USUAL * gradient_updates(run.config)
        for run in planted_on(runs, policy)
    }


def gradient_updates(config: ArmConfig) -> float:
    """Return how many updates of a run, with their looks, take as long as one gradient here."""
    batch, probe = config.train.batch_size, config.probe
    look = LOOK_GRADIENTS * WIDER * min(probe.gradient_sequences or batch, batch) / batch
    return in_mean_updates(WIDER * min(SEQUENCES, batch) / batch, look, probe.gradient_every)


def assay_whole_run(
    run: Run, policy: PolicyConfig, observer: StudyObserver, *, isolated: bool
) -> AssayRecord | None:
    """Do what `assay_run` does, `isolated` in a process of its own.

    Where a snapshot that it reads was dropped the run is trained anew first: so it is of a
    candidate that failed, and no longer does. Errors as `assay_run` and `retrain`.
    """
    call = call_alone if isolated else _call_here
    manifest = read_manifest(run.paths.manifest)
    named = {
        step: run.paths.name_of(snapshot_of(run.paths, manifest, step))
        for step in steps_of(run.paths)
    }
    gone = [step for step, name in named.items() if name in manifest.dropped]
    weights = run.paths
    if gone and touches(run.arm.diff, ("attention",)):
        call(_sources_now, run)  # with other sources it would be trained for nothing
        weights = retrain(run.paths, f"its snapshot of step {gone[0]}", observer, isolated=isolated)
    if isolated:
        return call_alone(assay_run, run, policy, weights, observer=observer)
    return assay_run(run, policy, weights, observer)


def _call_here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def assay_run(
    run: Run,
    policy: PolicyConfig,
    weights: RunPaths | None = None,
    observer: StudyObserver | None = None,
) -> AssayRecord | None:
    """Return what each planted fault shows on the candidate of `run`; None if it is no attention.

    Snapshots are read from `weights`, the same run trained anew, if that is given; `observer` is
    told of each look. ValueError for a run without snapshots of trained weights, a damaged one, and
    one that was trained with other sources than those that would be measured now.
    """
    device = resolve_device(run.config)
    gradients = attentions_of_arm(run.config, device)
    if gradients is None:
        return None
    sources = _sources_now(run)
    steps = steps_of(run.paths)
    if not steps:
        raise ValueError(f"assay: {run.paths.root} must have a snapshot after step 0, has none")
    own, faults = plant_faults(
        _looks(run, weights or run.paths, gradients, steps, device),
        faults_due(run.config.precision),
        gradients.baseline[0],
        partial(is_settled, policy),
        lambda done, most, faults: (
            observer.assay_advanced(run.arm.name, done, most, looks_at(faults))
            if observer
            else None
        ),
    )
    return AssayRecord(
        arm=run.arm.name,
        seed=run.seed,
        parents=parents_of(run.paths),
        own=own,
        faults=faults,
        sources=sources,
    )


def _sources_now(run: Run) -> dict[str, str]:
    """Return the sources that faults would be planted with; ValueError unless the run's own."""
    manifest = read_manifest(run.paths.manifest)
    trained = sources_of(manifest.resolved, manifest.environment)
    now = sources_of(assemble(run.config).attention.description, environment())
    other = [name.replace("_", " ") for name in now if now[name] != trained[name]]
    if other:
        raise ValueError(
            f"assay: {run.arm.name} must have the {other[0]} that it was trained with, has another "
            f"now; restore it, or move {run.paths.root} away to train it anew"
        )
    return now


def _looks(
    run: Run,
    paths: RunPaths,
    gradients: ModelGradients,
    steps: Sequence[int],
    device: torch.device,
) -> list[FaultLook]:
    """Return up to MOST looks: the run's own batches in order, over the snapshots in turn."""
    weights = [
        {name: value.to(device) for name, value in read_run_snapshot(paths, step).items()}
        for step in steps
    ]
    rounding = attention_rounding(run.config.precision)
    # q may still be as wide as the model where autocast narrows it on the way into the kernel
    dtype = rounding if isinstance(rounding, torch.dtype) else None
    loader = load_data(run.config).train_dataloader()
    # of the whole batch, of which a slice is a view, nothing else is kept
    batches = [batch[:SEQUENCES].clone() for batch in islice(loader, MOST)]
    # sequences in another order are the same ones: each has its own rounding errors again
    rows = [tuple(sorted(map(tuple, batch.tolist()))) for batch in batches]
    looks = []
    for place, at in distinct_looks(rows, len(weights)):
        of, whole = weights[at], batches[place].to(device)
        looks.append(
            FaultLook(
                gradient=partial(_gradient, gradients, of, whole),
                operator=partial(_gradient, gradients, of, whole[: max(1, SEQUENCES // 2)]),
                dtype=dtype,
            )
        )
    return looks


def _gradient(
    gradients: ModelGradients,
    weights: Mapping[str, Tensor],
    batch: Tensor,
    plant: Plant,
    role: AttentionRole,
    is_isolated: bool,
) -> Mapping[str, Tensor]:
    layers = zip(gradients.candidate, gradients.changed, strict=True)
    candidate = [plant(attention) if changed else attention for attention, changed in layers]
    planted = replace(gradients, candidate=candidate)
    return planted.of(weights, batch, role, is_isolated)
