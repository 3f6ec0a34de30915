"""A whole study: everything is checked before the first byte is written, then run after run.

Seeds are the outer loop, and in each the baseline comes first and the controls next: a study
stopped half-way holds whole pairs. What is measured once all have trained is measured by one
process, whoever trained them. How one run is trained is left to `train_run`, how progress is shown
to the observer, and runs on other machines to `execute`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import torch

from stability.analysis.pair_contract import axis_of
from stability.analysis.plan_gaps import lacking_seeds, plan_gaps
from stability.analysis.protocol_check import UNSEALED, changes_between, make_protocol
from stability.analysis.study_records import read_study
from stability.callbacks.study_observer import StudyObserver
from stability.config.arms import Arm, expand, probe_of_seed
from stability.config.convert import to_dict
from stability.config.roles import order_of_role
from stability.config.schema import BASELINE, ArmConfig
from stability.config.study import StudyConfig
from stability.records.atomic_files import DiskFullError
from stability.records.paths import RunPaths, StudyPaths
from stability.records.protocol import (
    Protocol,
    has_begun,
    protocol_hash,
    read_protocol,
    seal_protocol,
)
from stability.records.sealed_json import write_sealed
from stability.study.assay import assay_whole_run, update_assays
from stability.study.assays import failed_arms
from stability.study.assemble import (
    assemble,
    imports_user_modules,
    load_data,
    resolve_device,
)
from stability.study.attention_trial import try_attention
from stability.study.fresh_process import call_alone, call_for
from stability.study.processes import train_in_processes
from stability.study.run import (
    Run,
    check_existing,
    check_kept,
    has_ended,
    needs_no_training,
    reopen,
)
from stability.study.settle import (
    alone_with,
    awaiting_assay,
    of_seed,
    settle_ended,
    settle_seed,
)
from stability.study.size_check import check_disk, check_memory
from stability.study.storage import baselines_to_restore, drop_by_policy
from stability.study.train_run import TrainOptions, train
from stability.study.window import freeze_window

__all__ = [
    "StudyError",
    "Training",
    "changed_protocol",
    "check_study",
    "finish_study",
    "in_training_order",
    "may_pass",
    "plan_study",
    "run_study",
    "sealed_under",
    "too_few_seeds",
]


T = TypeVar("T")

Training = Callable[[list[Run], StudyObserver], None]
"""Brings runs to their end, each after its baseline, and tells the observer how they went."""


class StudyError(ValueError):
    """Something that a study asks for can't be had here: its text, an attention, the memory."""


def plan_study(study: StudyConfig, out: Path) -> list[Run]:
    """Return the runs of `study` in the order they are trained; writes nothing.

    ContractError if an arm changes more than one axis, or what no arm may change.
    """
    folder = StudyPaths(out / study.name).root
    arms: list[tuple[Arm, str]] = [
        (arm, axis_of(arm, study.allow_many)) for arm in in_training_order(expand(study))
    ]
    return [
        Run(
            study=study.name,
            arm=_as_probed(arm, is_first=seed == study.seeds[0]),
            axis=axis,
            seed=seed,
            paths=RunPaths.for_run(folder, arm.name, seed),
            baseline=None if arm.name == BASELINE else RunPaths.for_run(folder, BASELINE, seed),
        )
        for seed in study.seeds
        for arm, axis in arms
    ]


def in_training_order(arms: list[Arm]) -> list[Arm]:
    """Return `arms` in the order in which the runs of one seed are trained."""
    return sorted(arms, key=lambda arm: order_of_role(arm.role))


def _as_probed(arm: Arm, *, is_first: bool) -> Arm:
    probe = probe_of_seed(arm.config.probe, is_first=is_first)
    return replace(arm, config=replace(arm.config, probe=probe))


def check_study(
    runs: list[Run],
    jobs: int = 1,
    *,
    isolated: bool = False,
    here: int = 0,
    keep: str = "all",
) -> list[tuple[Run, list[str]]]:
    """Check everything that can be known before training `jobs` runs at once; write nothing.

    Returns each run that has ended and what is damaged of it: see `run.reopen`. `isolated`, what
    needs the user's modules is checked in processes of their own: else all that comes later would
    find what they do to a process. `here` is how many ranks of a run train on this machine, 0 for
    all; `keep` is the study's, by which files make room for others.
    StudyError for a device or precision that cannot be had, an unknown attention, a text that is
    missing or too short, sizes beyond this machine's memory or disk; RunConflictError for a
    directory that holds another run.
    """
    call = call_for if isolated else _call_here
    arms = {run.arm.name: [one for one in runs if one.arm.name == run.arm.name] for run in runs}
    found: dict[RunPaths, list[str]] = {}
    for its_runs in arms.values():
        of_each = call(its_runs[0].config, _find_damage, its_runs)
        found |= zip((run.paths for run in its_runs), of_each, strict=True)
    damaged = [(run, found[run.paths]) for run in runs if found[run.paths]]
    sent_back = {run.paths for run, _ in damaged}
    begun = {run.paths for run in runs if run.paths in sent_back or not has_ended(run.paths)}
    restored = baselines_to_restore(runs, begun)
    damaged += [(run, [restored[run.paths]]) for run in runs if run.paths in restored]
    sent_back |= restored.keys()
    for run in runs:
        if run.baseline is not None and run.paths not in sent_back:
            check_kept(run, baseline_is_kept=run.baseline not in sent_back)
    to_train = [run for run in runs if run.paths in sent_back or not has_ended(run.paths)]
    try:
        # before any model is built, which may itself be beyond memory
        _check_gpus(to_train, here)
        check_memory(to_train, jobs, here)
        check_disk(to_train, runs[0].paths.root.parent.parent, keep)
        on_gpu: list[ArmConfig] = []
        for its_runs in arms.values():
            # the first run of each arm: those of further seeds may train without a probe
            config = its_runs[0].config
            if not isolated or resolve_device(config).type != "cuda":
                call(config, _check_parts, config)
            elif imports_user_modules(config):
                call_alone(_check_each, [config])
            else:
                on_gpu.append(config)
        if on_gpu:
            # by a process that ends: this one would hold a GPU for as long as the runs need it
            call_alone(_check_each, on_gpu)
    except ValueError as error:
        raise StudyError(str(error)) from error
    return damaged


def _check_gpus(runs: list[Run], here: int) -> None:
    """ValueError for a run over more ranks than there are GPUs, of which each takes one."""
    count = torch.cuda.device_count()
    for run in runs:
        ranks = here or run.config.parallel.ranks
        if ranks > 1 and resolve_device(run.config).type == "cuda" and ranks > count:
            raise ValueError(
                f"parallel must be a layout over at most {count} ranks here, one a GPU, got "
                f"{ranks} in arm {run.arm.name}; train.accelerator: cpu takes any number"
            )


def _call_here(_: ArmConfig, function: Callable[..., T], *args: Any) -> T:
    return function(*args)


def _find_damage(runs: list[Run]) -> list[list[str]]:
    return [check_existing(run) for run in runs]


def _check_each(configs: list[ArmConfig]) -> None:
    for config in configs:
        _check_parts(config)


def _check_parts(config: ArmConfig) -> None:
    parts, device = assemble(config), resolve_device(config)
    if device.type == "cuda":
        # after the sizes: a small call is enough to know whether a kernel fits
        called = (parts.attention, *parts.shadows)
        try_attention(called, config.model, config.precisions, device)
    load_data(config)


def run_study(
    study: StudyConfig,
    out: Path,
    *,
    options: TrainOptions,
    observer: StudyObserver,
    jobs: int = 1,
    isolated: bool = True,
    elsewhere: Training | None = None,
) -> list[Run]:
    """Train every arm and seed of `study` into `out/<name>`, and return the runs.

    Runs that have ended are kept, interrupted ones resumed, and damaged ones trained again. A
    failure is recorded in the run's manifest and the other runs go on, but a candidate whose
    baseline failed is not started. As each run ends, what need not stay of it is dropped. Up to
    `jobs` runs train at once, each in a fresh process of its own. Not `isolated`, they train one
    after another in this process, for a debugger: what one does to the process, the next one finds.
    With `elsewhere` it is that which trains them, on machines that may have what this one lacks.
    The protocol is sealed before the first of them, and an older one is kept. DiskFullError where
    the disk is full: nothing that was written is lost. ValueError as `check_study`, for a damaged
    protocol, and for `jobs` below 1.
    """
    if jobs < 1:
        raise ValueError(f"jobs must be >= 1, got {jobs}")
    runs = plan_study(study, out)
    damaged = (
        _check_records(runs)
        if elsewhere
        else check_study(runs, jobs, isolated=isolated, keep=study.keep)
    )
    sealed = sealed_under(study, out, runs)
    for run, found in damaged:
        reopen(run, found, observer)
    runs = [replace(run, protocol=sealed) for run in runs]
    if few := too_few_seeds(study, runs):
        observer.study_noted(f"no PASS as it stands: {few}")
    settle = _settling(runs, study.keep, observer)
    if elsewhere is not None:
        elsewhere(runs, observer)
    elif isolated:
        train_in_processes(runs, jobs, options, observer, on_end=settle)
    else:
        _train_in_turn(runs, options, observer, settle)
    finish_study(study, runs, observer, isolated=isolated)
    return runs


def too_few_seeds(study: StudyConfig, runs: list[Run]) -> str:
    """Return that no look will be made, where an arm is broken on purpose for one; mostly empty."""
    is_judged = any(run.arm.role == "broken" for run in runs)
    return lacking_seeds(study.seeds) if is_judged else ""


def _check_records(runs: list[Run]) -> list[tuple[Run, list[str]]]:
    """Check what is on record, as `check_study`, and nothing of this machine."""
    found = [(run, check_existing(run, trains_here=False)) for run in runs]
    damaged = [(run, what) for run, what in found if what]
    sent_back = {run.paths for run, _ in damaged}
    begun = {run.paths for run in runs if run.paths in sent_back or not has_ended(run.paths)}
    restored = baselines_to_restore(runs, begun)
    damaged += [(run, [restored[run.paths]]) for run in runs if run.paths in restored]
    sent_back |= restored.keys()
    for run in runs:
        if run.baseline and has_ended(run.baseline) and not sent_back & {run.paths, run.baseline}:
            check_kept(run, baseline_is_kept=True)
    return damaged


def sealed_under(study: StudyConfig, out: Path, runs: list[Run]) -> str:
    """Seal the protocol of `study`, write down its plan, and return the hash of the protocol."""
    folder, content = StudyPaths(out / study.name).root, _content(study, runs)
    seal_protocol(folder, _protocol(study, content))
    write_sealed(StudyPaths(folder).study, content)
    return protocol_hash(folder)


def finish_study(
    study: StudyConfig, runs: list[Run], observer: StudyObserver, *, isolated: bool = True
) -> None:
    """Measure what is measured once all runs have trained; what is on record is kept.

    These are the distances between arms, drifts that must be computed anew, the window and the
    assays. If another process does it, this one waits for it, and finds nothing left to do.
    """
    folder = runs[0].paths.root.parent.parent
    with alone_with(folder, observer):
        for seed in study.seeds:
            # a second time where it was whole: what is on record isn't measured again
            settle_seed(runs, study.keep, observer, seed)
        freeze_window(folder)
        update_assays(
            folder,
            runs,
            study.policy,
            observer.run_noted,
            observer.study_noted,
            planned=observer.assays_planned,
            measure=partial(assay_whole_run, observer=observer, isolated=isolated),
        )
        # the first seed's, which faults were planted on
        first = of_seed(runs, study.seeds[0])
        spared = awaiting_assay(first) if study.keep != "all" else set()
        if spared:
            # no fault is planted on those; if that changes with more seeds they are trained anew
            spared -= failed_arms(folder, study.policy)
        drop_by_policy(folder, first, study.keep, spared=spared)


def _settling(runs: list[Run], keep: str, observer: StudyObserver) -> Callable[[Run], None]:
    """Return what is called with each run once it has ended, or will not be tried again."""
    left = Counter(run.seed for run in runs)
    before = {run.paths for run in runs if has_ended(run.paths)}

    def settle(run: Run) -> None:
        left[run.seed] -= 1
        if left[run.seed] and run.paths in before:
            return  # what it is measured from was there when it ended
        settle_ended(runs, keep, observer, run.seed, is_over=not left[run.seed])

    return settle


def _train_in_turn(
    runs: list[Run], options: TrainOptions, observer: StudyObserver, settle: Callable[[Run], None]
) -> None:
    for index, run in enumerate(runs, start=1):
        if not needs_no_training(run, observer):
            _train_here(index, len(runs), run, options, observer)
        settle(run)


def _train_here(
    index: int, total: int, run: Run, options: TrainOptions, observer: StudyObserver
) -> None:
    observer.run_started(index, total, run.arm.name, run.seed, run.last_step)
    try:
        manifest = train(run, options, observer)
        observer.run_ended(run.arm.name, run.seed, manifest.state, manifest.message)
    except DiskFullError as error:
        observer.run_ended(run.arm.name, run.seed, "interrupted", str(error))
        raise
    except Exception as error:
        observer.run_ended(run.arm.name, run.seed, "failed", f"{type(error).__name__}: {error}")


def changed_protocol(study: StudyConfig, out: Path) -> list[str]:
    """Return what `study` asks otherwise than was sealed in `out/<name>`; empty before a first run.

    Writes nothing. ValueError if the sealed protocol is damaged.
    """
    folder = StudyPaths(out / study.name).root
    if not StudyPaths(folder).protocol.exists():
        return [UNSEALED] if has_begun(folder) else []
    now = _protocol(study, _content(study, plan_study(study, out)))
    return changes_between(read_protocol(StudyPaths(folder).protocol), now)


def may_pass(study: StudyConfig, runs: list[Run]) -> bool:
    """Whether nothing that a PASS needs is missing in `runs`, of `plan_study`; keeps nothing."""
    configs = {run.arm.name: to_dict(run.config) for run in runs if run.seed == runs[0].seed}
    with TemporaryDirectory(prefix="stability-gaps-") as folder:
        write_sealed(StudyPaths(Path(folder)).study, _content(study, runs))
        return not plan_gaps(read_study(Path(folder)), configs)


def _protocol(study: StudyConfig, content: Mapping[str, Any]) -> Protocol:
    probes = {arm.name: to_dict(arm.config.probe) for arm in expand(study)}
    return make_protocol(content["config"], content["arms"], probes)


def _content(study: StudyConfig, runs: list[Run]) -> dict[str, Any]:
    """Return what `study.json` holds: the config, and each arm in the order of the study."""
    axes = {run.arm.name: run.axis for run in runs}
    return {
        "config": to_dict(study),
        "arms": [
            {
                "name": arm.name,
                "axis": axes[arm.name],
                "diff": to_dict(arm.diff),
                "role": arm.role,
                "until": arm.until,
            }
            for arm in expand(study)
        ],
    }
