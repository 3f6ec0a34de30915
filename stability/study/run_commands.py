"""A whole study of commands: everything is checked before the first one runs, then run after run.

Seeds are the outer loop, and in each the baseline comes first and the controls next, as in
`run_study`. How one command is recorded is left to `foreign`.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

from stability.analysis.pair_contract import recorded_axis
from stability.analysis.plan_gaps import NO_QUESTION, plan_gaps
from stability.analysis.protocol_check import UNSEALED, changes_between, make_protocol
from stability.analysis.study_records import read_study
from stability.callbacks.study_observer import StudyObserver
from stability.config.command_study import (
    CommandArm,
    CommandConfig,
    CommandStudy,
    expand_commands,
)
from stability.config.convert import to_dict
from stability.config.diff import diff
from stability.config.masking import masked_values
from stability.config.roles import order_of_role
from stability.config.schema import BASELINE
from stability.recorder.launch import Asked
from stability.records.manifest import ENDED, read_manifest
from stability.records.metric_log import read_metrics
from stability.records.metric_names import TRAIN_LOSS
from stability.records.paths import StudyPaths
from stability.records.protocol import Protocol, has_begun, read_protocol, seal_protocol
from stability.records.sealed_json import write_sealed
from stability.study.edited_sources import refuse_edited
from stability.study.foreign import RunFailedError, measure_seed, measure_study, record_command
from stability.study.foreign_assay import assay_commands
from stability.study.foreign_plan import ForeignRun, check_attention_name, check_free
from stability.study.late_start import check_checkpoint, checkpoint_entry
from stability.study.named_functions import check_named_functions
from stability.study.run import RunConflictError
from stability.study.window import freeze_window
from stability.study.worktree import checkout, commit_of, repository

__all__ = [
    "changed_command_protocol",
    "folder_of",
    "plan_commands",
    "planned_gaps",
    "record_planned",
    "run_commands",
]


def plan_commands(study: CommandStudy, out: Path) -> list[ForeignRun]:
    """Return the runs of `study` in the order in which they are made; writes nothing.

    ValueError for a commit or an interpreter that is not there, and for a command that can't be
    found; ContractError if an arm changes more than one thing, or what no arm may change.
    """
    arms = [_with_commit(arm) for arm in expand_commands(study)]
    base = arms[0].config.recorded()
    runs = [
        _run(study, out, arm, base, seed)
        for seed in study.seeds
        for arm in sorted(arms, key=lambda arm: order_of_role(arm.role))
    ]
    for run in runs[: len(arms)]:
        _check_words(run)
    return runs


def run_commands(
    study: CommandStudy, out: Path, *, observer: StudyObserver, check_observer: bool = False
) -> list[ForeignRun]:
    """Run every arm and seed of `study` into `out/<name>`, and return the runs.

    Runs that have ended are kept. A run that fails is told and its manifest says why; the others go
    on, but none whose baseline failed. With `check_observer` each arm's first run is made once
    more, unobserved, and must end in the same bits. The protocol is sealed before the first run.
    What a command prints goes to `output.txt` in its run's folder. ValueError as `plan_commands`,
    for a folder that holds another run, for a checkpoint that is another one than a baseline on
    record began from, for what `setup` fails in, and where a source of a run that has ended was
    edited since.
    """
    runs = plan_commands(study, out)
    for run in runs:
        check_free(run, "give the changed study another `name:`, where all its runs train anew")
        if not run.is_kept and run.baseline is not None and run.baseline.manifest.exists():
            checkpoint_entry(run)
    folders = {run.arm: folder_of(run) for run in runs[: len(study.arms)]}
    check_named_functions(runs, folders)
    _refuse_edited(runs, folders)
    content = _content(study, runs)
    folder = StudyPaths(out / study.name)
    seal_protocol(folder.root, _protocol(content))
    write_sealed(folder.study, content)
    _measure_kept(runs, observer)
    _tell_ahead(runs, observer)
    failed: set[int] = set()
    for index, run in enumerate(runs, start=1):
        if run.is_kept:
            observer.run_ended(run.arm, run.seed, read_manifest(run.paths.manifest).state, "kept")
            continue
        observer.run_started(index, len(runs), run.arm, run.seed, study.base.train.steps)
        observer.run_advanced(run.arm, run.seed, 0, None)  # none goes on from a checkpoint
        if run.seed in failed:
            observer.run_ended(run.arm, run.seed, "failed", f"its {BASELINE} has failed")
            continue
        state, message = record_planned(
            run,
            folders[run.arm],
            observer,
            check_observer=check_observer and run.seed == study.seeds[0],
        )
        observer.run_ended(run.arm, run.seed, state, message)
        if run.arm == BASELINE and state not in ENDED:
            _stop_at_held_out(run, message, is_first=not any(x.is_kept for x in runs))
            failed.add(run.seed)
        if run.seed not in failed:
            for note in measure_study(run):
                observer.run_noted(run.arm, run.seed, note)
    freeze_window(folder.root)
    first = [run for run in runs if run.seed == study.seeds[0]]
    if any(run.role == "broken" for run in first):
        assay_commands(
            first,
            folders,
            study.policy,
            observer.run_noted,
            observer.study_noted,
            observer.assay_advanced,
            observer.assays_planned,
        )
    return runs


def _stop_at_held_out(run: ForeignRun, message: str, *, is_first: bool) -> None:
    """ValueError if a baseline has failed in the held-out loss of the user's, which all runs call.

    Not where a run was recorded with it: there it is that seed's own trouble.
    """
    # how each of `inside.held_out`'s errors begins
    if (
        is_first
        and ":" in run.asked.held_out
        and f"held_out: {run.asked.held_out} must " in message
    ):
        raise ValueError(
            "base.held_out: must be MODULE:FUNCTION that takes the model and returns its mean loss "
            f"as one number, got {run.asked.held_out!r}, in which {run.arm}, seed {run.seed}, has "
            f"failed; no other run was begun, since each would fail in it: see {run.paths.output}"
        )


def _measure_kept(runs: Sequence[ForeignRun], observer: StudyObserver) -> None:
    """Measure what is missing, as of a run that was killed as it ended, or of a damaged record."""
    for run in {run.seed: run for run in runs if run.is_kept}.values():
        for note in measure_seed(run):
            observer.run_noted(run.arm, run.seed, note)


def _tell_ahead(runs: Sequence[ForeignRun], observer: StudyObserver) -> None:
    """Say before the first run what the study can't answer as it stands, and what takes long."""
    if has_begun(runs[0].folder):
        return
    first = _first_seed(runs)
    gaps = _gaps(runs[0].folder, first)
    for gap in gaps:
        observer.study_noted(f"no PASS as it stands: {gap}")
    if gaps and gaps != [NO_QUESTION]:
        observer.study_noted(
            "to change more than the seeds interrupt now, edit the study's file and move "
            f"{runs[0].folder} away: what is judged was sealed there"
        )
    slow = " and ".join(run.arm for run in first if run.asked.probe.get("gradient_every"))
    if slow and len(first) < len(runs):
        observer.study_noted(
            f"with seed {runs[0].seed} alone the whole model's gradient is looked at: there "
            f"{slow} may take several times as long as with other seeds"
        )


def planned_gaps(study: CommandStudy, runs: Sequence[ForeignRun]) -> list[str]:
    """Return what `runs`, of `plan_commands`, lack for a PASS, as `plan_gaps`; keeps nothing."""
    with TemporaryDirectory(prefix="stability-gaps-") as folder:
        write_sealed(StudyPaths(Path(folder)).study, _content(study, runs))
        return _gaps(Path(folder), _first_seed(runs))


def _first_seed(runs: Sequence[ForeignRun]) -> list[ForeignRun]:
    return [run for run in runs if run.seed == runs[0].seed]


def _gaps(folder: Path, first: Sequence[ForeignRun]) -> list[str]:
    """Return the gaps of the plan in `folder`, whose runs of the first seed are `first`."""
    return plan_gaps(read_study(folder), {run.arm: run.config for run in first})


def _refuse_edited(runs: Sequence[ForeignRun], folders: Mapping[str, Path | None]) -> None:
    for run in runs:
        if run.is_kept:
            refuse_edited(run, folders[run.arm])


def changed_command_protocol(study: CommandStudy, out: Path) -> list[str]:
    """Return what `study` asks otherwise than was sealed in `out/<name>`; empty before a first run.

    Writes nothing. ValueError if the sealed protocol is damaged.
    """
    folder = StudyPaths(out / study.name)
    if not folder.protocol.exists():
        return [UNSEALED] if has_begun(folder.root) else []
    now = _protocol(_content(study, plan_commands(study, out)))
    return changes_between(read_protocol(folder.protocol), now)


def _run(
    study: CommandStudy, out: Path, arm: CommandArm, base: Mapping[str, Any], seed: int
) -> ForeignRun:
    config = arm.config.recorded()
    differences = diff(base, config)
    return ForeignRun(
        study=study.name,
        folder=out / study.name,
        arm=arm.name,
        seed=seed,
        config=config,
        diff={path: list(values) for path, values in differences.items()},
        axis=recorded_axis(
            f"arms.{arm.name}",
            differences,
            arm.role,
            arm.change,
            allow_many=study.allow_many,
        ),
        role=arm.role,
        asked=Asked(
            seed=seed,
            steps=arm.config.train.steps,
            snapshot_steps=arm.config.train.planned_snapshots()[1:],
            deterministic=arm.config.deterministic,
            attention=arm.config.attention,
            held_out=arm.config.held_out,
            probe=_probe(arm.config, is_first=seed == study.seeds[0]),
            same_start=arm.config.same_start,
            nudge=(arm.config.nudge.ulps, arm.config.nudge.draw),
        ),
        words=arm.config.words(),
        env=arm.config.env,
        setup=arm.config.setup,
        checkout=repository(Path.cwd()) if arm.config.ref else None,
        question=study.question,
        policy=to_dict(study.policy),
    )


def _probe(config: CommandConfig, *, is_first: bool) -> dict[str, Any]:
    """Return what a seed is looked at: the whole model's gradient is the first one's alone."""
    settings = config.probe.settings()
    return settings if is_first or not settings else {**settings, "gradient_every": 0}


def _with_commit(arm: CommandArm) -> CommandArm:
    """Return the arm with the whole hash of its commit: a branch's name moves."""
    config = arm.config
    if not config.ref:
        return arm
    try:
        commit = commit_of(config.ref, Path.cwd())
    except ValueError as error:
        raise ValueError(f"arms.{arm.name}.{error}") from error
    return replace(arm, config=replace(config, ref=commit))


def _check_words(run: ForeignRun) -> None:
    """ValueError if the interpreter or the program of a run is not there."""
    check_attention_name(run.asked.attention)
    check_attention_name(run.asked.probe.get("candidate", ""))
    check_checkpoint(run)
    python = run.config["python"]
    if python and not Path(python).is_file():
        raise ValueError(f"arms.{run.arm}.python: must be an interpreter, {python!r} is no file")
    path = str(Path(python).parent) if python else None
    if not which(run.words[0], path=path) and not which(run.words[0]):
        raise ValueError(f"base.command: {run.words[0]!r} must be a program, is not found on PATH")


def folder_of(run: ForeignRun) -> Path | None:
    """Return the checkout that a run of a commit runs in, made if need be; None for no commit."""
    if not run.config["ref"]:
        return None
    return checkout(run.config["ref"], Path.cwd(), run.setup)


def record_planned(
    run: ForeignRun, folder: Path | None, observer: StudyObserver, *, check_observer: bool = False
) -> tuple[str, str]:
    """Run and record one; return its state and what there is to say of it."""
    try:
        manifest = record_command(
            run,
            folder=folder,
            output=run.paths.output,
            check_observer=check_observer,
            advanced=partial(observer.run_advanced, run.arm, run.seed),
        )
    except RunFailedError as error:
        return "failed", f"{error}; what it printed is in {run.paths.output}"
    except RunConflictError as error:
        return read_manifest(run.paths.manifest).state, str(error)
    except ValueError as error:  # what only now can't be, as of a checkpoint that an arm overwrote
        return "failed", str(error)
    losses = read_metrics(run.paths.metrics).get(TRAIN_LOSS)
    if losses:
        observer.run_advanced(run.arm, run.seed, manifest.step, losses.values[-1])
    for note in manifest.resolved["notes"]:
        observer.run_noted(run.arm, run.seed, note)
    return manifest.state, manifest.message


def _protocol(content: Mapping[str, Any]) -> Protocol:
    return make_protocol(content["config"], content["arms"], {})


def _content(study: CommandStudy, runs: Sequence[ForeignRun]) -> dict[str, Any]:
    """Return what `study.json` holds: the config, and each arm in the order of the study."""
    of_arms = {run.arm: run for run in runs}
    config = masked_values(to_dict(study))
    config["base"] = dict(of_arms[BASELINE].config)
    return {
        "config": config,
        "arms": [
            {
                "name": name,
                "axis": of_arms[name].axis,
                "diff": to_dict(of_arms[name].diff),
                "role": of_arms[name].role,
                "until": study.base.train.steps,
            }
            for name in study.arms
        ],
    }
