"""Trains one run: starts or resumes it, and leaves a manifest that says how it ended.

The order of runs is left to `run_study`, how progress is shown to the observer.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import Logger

from stability.analysis.pair_contract import ContractError, check_batches, check_start, may_differ
from stability.analysis.witness_contract import claims_of, other_answer, testimony_of
from stability.callbacks.progress import ProgressCallback
from stability.callbacks.study_observer import StudyObserver
from stability.config.axes import CHANGES_WEIGHTS, touches
from stability.config.convert import to_dict
from stability.config.diff import hash_without
from stability.config.schema import BASELINE, ArmConfig
from stability.data.datamodule import TextDataModule
from stability.model.layouts import hash_whole
from stability.model.ranks import ALONE, Ranks, joined, part
from stability.recorder.trainer_door import TrainerDoor
from stability.recorder.witnessing import WitnessError, Witnessing
from stability.recorder.writer import Baseline, RunWriter, stopped
from stability.records.atomic_files import DiskFullError, is_disk_full
from stability.records.git_state import git_state
from stability.records.identity import environment, hash_environment, is_compared
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import MetricLog
from stability.records.module_sources import own_modules, watch_sources
from stability.records.numeric_switches import numeric_switches
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.run_files import RunFiles
from stability.records.run_lease import LeaseLostError
from stability.records.stale_bytecode import refuse_stale_bytecode
from stability.records.witness import Label, Witness
from stability.study.assemble import (
    Parts,
    assemble,
    fit,
    load_data,
    make_trainer,
    resolve_device,
)
from stability.study.checkpoints import clear_unlisted, lay_fork, resume_from
from stability.study.observer_gate import ObserverError, check_observer
from stability.study.process_switches import switched
from stability.study.run import (
    Run,
    RunConflictError,
    has_ended,
    locked,
    refuse_other_process,
    snapshot_steps_of,
)
from stability.tracking.environment import WandbMode
from stability.tracking.history import MirroredLog, WandbRun, open_wandb_run
from stability.tracking.loggers import RecordsLogger
from stability.tracking.wandb_run import in_a_line

__all__ = ["TrainOptions", "UnfinishedError", "train"]


class UnfinishedError(RuntimeError):
    """A training ended at another step than was planned, and its loss did not diverge."""


class CheckpointError(ValueError):
    """A run can't go on from a checkpoint that has the checksum it should have."""


_FAILURES = {
    ContractError: "pair contract",
    ObserverError: "observer gate",
    WitnessError: "witness",
    UnfinishedError: "unfinished",
}
"""Failures that are told in the manifest and raised no further, and the word for each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainOptions:
    """What `stability run` asks of every run, besides its config; no bit depends on it."""

    wandb_mode: WandbMode
    check_observer: bool = False
    """Whether a run must pass the observer gate first; one that instruments would change fails."""
    wandb_failures: list[str] = field(default_factory=list)
    """Why W&B could not be reached from runs; once there is one, no run that starts tries it."""


def train(
    run: Run, options: TrainOptions, observer: StudyObserver, ranks: Ranks = ALONE
) -> Manifest:
    """Train `run` to its last step, from its last whole checkpoint if there is one.

    Of a run over several `ranks` this is the first one's part; the others `follow`.

    Returns the final manifest, with state `finished` if and only if the training took every step
    that was planned. Every failure is recorded in it. A broken pair contract or observer gate, a
    witness that contradicts the run's label, or an end at another step, is returned as state
    `failed`, any other error is raised as well; an interrupt is recorded as `interrupted` and
    raised as KeyboardInterrupt, a full disk as DiskFullError. RunConflictError if another process
    is training the run.
    """
    with locked(run.paths):
        if has_ended(run.paths):  # another process has trained it while this one waited
            return read_manifest(run.paths.manifest)
        with (
            switched(run.config.train),  # before the user's modules, which may turn one again
            joined(ranks, resolve_device(run.config)),
        ):
            return _train(run, options, observer, ranks)


def _train(run: Run, options: TrainOptions, observer: StudyObserver, ranks: Ranks) -> Manifest:
    config, before_imports = run.config, numeric_switches()
    _refuse_other_count(config, ranks)
    watch_sources()
    parts = assemble(config)
    data = load_data(config, ranks)
    start, listed = _find_start(run, observer)
    first = _first_manifest(run, parts, data, listed)
    if start > (run.fork.at if run.fork else 0):
        known = read_manifest(run.paths.manifest)
        refuse_other_process(run, known, first.environment)
        _refuse_other_start(run, known, first)
    files = RunFiles(run.paths, first)
    files.update()
    if start == 0 and run.fork is not None and run.baseline is not None:
        # only now that the manifest is there: after a kill in between, the fork is laid down again
        start = run.fork.at
        listed = lay_fork(run.baseline, run.paths, start, parts.module.settle)
        files.update(files=listed)
    clear_unlisted(run.paths, listed)
    try:
        if run.baseline is not None:
            check_start(read_manifest(run.baseline.manifest), files.manifest)
        _refuse_other_environments(ranks.gathered(first.environment))
        ranks.told(start)
        if options.check_observer:
            files.update(observer=_pass_observer_gate(config, ranks))
        with _logged(run, options, observer) as log:
            writer = _writer(run, files, log, ranks)
            door = _door(run, writer, parts, data, start, before_imports, ranks)
            _fit(run, files, parts, data, start, door, log, observer, ranks)
        writer.ended(hash_whole(parts.model))
        part(ranks)
    except (KeyboardInterrupt, SystemExit):
        # Lightning turns Ctrl-C into SystemExit
        stopped(files, "interrupted")
        raise KeyboardInterrupt from None
    except tuple(_FAILURES) as error:
        stopped(files, "failed", f"{_FAILURES[type(error)]}: {error}")
    except Exception as error:
        if _was_interrupted(error):
            stopped(files, "interrupted")
            raise KeyboardInterrupt from None
        if is_disk_full(error):
            stopped(files, "interrupted")
            known = isinstance(error, DiskFullError)
            said = str(error) if known else f"{run.paths.root}: the disk is full: {error}"
            raise DiskFullError(said) from error
        stopped(files, "failed", f"{type(error).__name__}: {error}")
        raise
    return files.manifest


def _first_manifest(
    run: Run, parts: Parts, data: TextDataModule, listed: dict[str, str]
) -> Manifest:
    refuse_stale_bytecode(own_modules())
    found = environment()
    return Manifest(
        study=run.study,
        arm=run.arm.name,
        seed=run.seed,
        axis=run.axis,
        config=to_dict(run.config),
        diff={path: list(values) for path, values in run.arm.diff.items()},
        environment=found,
        resolved=parts.attention.description,
        hashes={
            "config_less_axis": hash_without(run.config, run.arm.diff),
            "environment": hash_environment(found),
            "init_weights": parts.init_hash,
            "shared_weights": parts.shared_hash,
            "start": parts.start_hash,
            "text": data.text_hash,
            "held_out": data.held_out_hash,
            "protocol": run.protocol,
        },
        state="running",
        step=0,
        message="",
        files=listed,
        fork=run.fork_record,
        until=run.last_step,
        role="" if run.fork else run.arm.role,
    )


def _refuse_other_count(config: ArmConfig, ranks: Ranks) -> None:
    if config.parallel.ranks != ranks.count:
        raise ValueError(
            f"parallel must be a layout over {ranks.count} ranks, as many as train it, got one "
            f"over {config.parallel.ranks}; train it by `stability run`, with processes of its own"
        )


def _refuse_other_environments(found: list[dict[str, Any]]) -> None:
    """RunConflictError unless all ranks have the first one's environment."""
    for rank, other in enumerate(found):
        for key in sorted({*found[0], *other}):
            if is_compared(key) and found[0].get(key) != other.get(key):
                raise RunConflictError(
                    f"environment.{key} must be the same on each rank, is {found[0].get(key)!r} on "
                    f"rank 0 and {other.get(key)!r} on rank {rank}"
                )


def _refuse_other_start(run: Run, known: Manifest, now: Manifest) -> None:
    """RunConflictError if a run that is resumed began from another file than lies there now."""
    was, found = (each.hashes.get("start", "") for each in (known, now))
    if was != found:
        raise RunConflictError(
            f"{run.paths.root}: began from {run.config.start} with checksum {was[:16]}, which has "
            f"{found[:16]} now; put the file back, or train the run anew in another folder"
        )


def _find_start(run: Run, observer: StudyObserver) -> tuple[int, dict[str, str]]:
    """Return the step to train from, and the files of the run that may be relied on."""

    def note(text: str) -> None:
        observer.run_noted(run.arm.name, run.seed, text)

    if not run.paths.manifest.exists():
        return 0, {}
    return resume_from(run.paths, read_manifest(run.paths.manifest), note)


def _pass_observer_gate(config: ArmConfig, ranks: Ranks) -> dict[str, Any]:
    """Return the gate's result for the manifest; ObserverError if the weights differ."""
    check = check_observer(config, ranks=ranks)
    if not check.equal:
        raise ObserverError(
            f"after {check.steps} steps the weights must be {check.unwatched[:16]} with every "
            f"instrument on, are {check.watched[:16]}"
        )
    return check.to_dict()


@contextlib.contextmanager
def _logged(run: Run, options: TrainOptions, observer: StudyObserver) -> Iterator[MetricLog]:
    """Give the run's log, of which W&B is shown each line where it can be reached."""
    wandb = _open_wandb_run(run, options, observer)
    log = MirroredLog(run.paths.metrics, wandb) if wandb else MetricLog(run.paths.metrics)
    failed = True
    try:
        yield log
        log.sync()
        failed = False
    finally:
        log.close()
        if isinstance(log, MirroredLog) and (trouble := log.end_mirror(failed=failed)):
            text = f"W&B lost the run, and gets it once the study has ended: {trouble}"
            observer.run_noted(run.arm.name, run.seed, text)


def _fit(
    run: Run,
    files: RunFiles,
    parts: Parts,
    data: TextDataModule,
    start: int,
    door: TrainerDoor,
    log: MetricLog,
    observer: StudyObserver,
    ranks: Ranks,
) -> None:
    """Train from step `start` to where the run is to end, or diverges; else UnfinishedError."""
    if start == 0 and isinstance(door.writer, RunWriter):
        door.writer.begin()
    told = ProgressCallback(observer, run.arm.name, run.seed, lambda: door.loss)
    callbacks = [*parts.callbacks, door, told]
    loggers: list[Logger] = [RecordsLogger(log)]
    trainer = make_trainer(run.config, files, loggers, callbacks, run.last_step, ranks)
    with _naming_checkpoint(files, trainer, start):
        fit(trainer, parts, data, run.paths.held_checkpoint(start) if start else None)
        door.end(trainer)
    step, logged = trainer.global_step, door.writer.step
    if door.writer.diverged is None and (step, logged) != (run.last_step, run.last_step):
        raise UnfinishedError(
            f"training must end at step {run.last_step}, ended at step {step} with the batches of "
            f"{logged} on record; a callback stopped it, or the batches ran out"
        )


@contextlib.contextmanager
def _naming_checkpoint(files: RunFiles, trainer: Trainer, start: int) -> Iterator[None]:
    """Name the checkpoint of step `start` in what goes wrong before an update follows it.

    Most of what it holds is Lightning's and the callbacks', who take it as it comes. One that they
    can't take is listed no more: the next start passes over it. It stays where something else may
    be to blame, as an error of the device.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        is_told = isinstance(error, (*_FAILURES, LeaseLostError)) or _was_interrupted(error)
        if not start or trainer.global_step > start or is_told:
            raise
        path, said = files.paths.held_checkpoint(start), " ".join(str(error).split())
        is_of_device = isinstance(error, RuntimeError) and not said.startswith("Error(s) in load")
        what = "the same command tries again"
        if not is_of_device:
            files.remove(path)
            what = "it is dropped, and the same command goes on from an older one or begins anew"
        raise CheckpointError(
            f"{path}: the run can't go on from it: {type(error).__name__}: {said[:300]}; {what}"
        ) from error


def _open_wandb_run(run: Run, options: TrainOptions, observer: StudyObserver) -> WandbRun | None:
    """Return the W&B run that shows `run`; None without W&B, and where W&B can't be reached.

    Each try waits for its time limit, so there is none after one that has failed.
    """
    if options.wandb_failures:
        return None
    try:
        return open_wandb_run(
            options.wandb_mode,
            study=run.study,
            arm=run.arm.name,
            seed=run.seed,
            axis=run.axis,
            changes=run.arm.diff,
            config=to_dict(run.config),
            paths=run.paths,
        )
    except Exception as error:  # the training must not die of a view, whatever W&B raises
        said = in_a_line(error)
        options.wandb_failures.append(said)
        text = (
            "W&B can't be reached, and gets this run and those that start later once the study has "
            f"ended: {said}"
        )
        observer.wandb_failed(run.arm.name, run.seed, text)
        return None


def _writer(run: Run, files: RunFiles, log: MetricLog, ranks: Ranks) -> RunWriter:
    train, baseline = run.config.train, None
    if run.baseline is not None:
        baseline = Baseline(
            paths=run.baseline,
            steps=_shared_steps(run, run.baseline),
            check=_batch_check(run, run.baseline),
            has_other_weights=touches(run.arm.diff, CHANGES_WEIGHTS),
        )
    return RunWriter(files, log, log_every=train.log_every, baseline=baseline, ranks=ranks)


def _door(
    run: Run,
    writer: RunWriter,
    parts: Parts,
    data: TextDataModule,
    start: int,
    before_imports: dict[str, Any],
    ranks: Ranks,
) -> TrainerDoor:
    """Return the callback that tells `writer` of the training, and of what it executes."""
    config = run.config
    witnessing = Witnessing(
        parts.model,
        run.last_step,
        before=before_imports,
        git=git_state(Path.cwd()),
        label=Label(
            arm=run.arm.name,
            precision=config.precision,
            implementation=parts.attention.description["implementation"],
            is_partial=config.attention.is_partial,
            **claims_of(to_dict(config)),
        ),
        unproven="torch.compile fuses operators" if config.train.compile else "",
        save=writer.witnessed,
        may_end=lambda: writer.may_diverge,
        beside=_answers_check(run),
    )
    return TrainerDoor(
        writer,
        parts.model,
        snapshot_steps_of(run),
        witnessing,
        start=start,
        held_out=data.held_out_batches,
        kept=config.held_out.prediction_batches,
        ranks=ranks,
        parallel=config.parallel,
    )


def _answers_check(run: Run) -> Callable[[Witness], str]:
    """Return a check that the known answers are those that the baseline's process computed.

    ContractError if the baseline's witness is damaged: then nobody can take the two for a pair.
    """
    if run.baseline is None:
        return lambda witness: ""
    baseline = testimony_of(run.baseline, read_manifest(run.baseline.manifest))
    if baseline.is_damaged:
        raise ContractError(baseline.lacking)
    # one of before there were witnesses says nothing; the pair is unproven then
    known = baseline.witness

    def check(witness: Witness) -> str:
        said = other_answer(known, witness, run.arm.diff) if known else ""
        return f"arm {run.arm.name} computes other bits than its {BASELINE}: {said}" if said else ""

    return check


def _batch_check(run: Run, baseline: RunPaths) -> Callable[[int], None]:
    """Return a check that the batches up to a step are the baseline's, unless they may differ."""
    if may_differ("batches", run.arm.diff):
        return lambda step: None
    return lambda step: check_batches(baseline, run.paths, step)


def _shared_steps(run: Run, baseline: RunPaths) -> set[int]:
    """Return the steps at which both runs have weights.

    A baseline that diverged has fewer snapshots; so may one that is the parent of a fork.
    """
    steps = snapshot_steps_of(run)
    if run.fork is None and read_manifest(baseline.manifest).state != "diverged":
        return steps
    return steps & {*snapshot_steps(baseline)}


def _was_interrupted(error: BaseException | None) -> bool:
    """Whether an interrupt caused `error`; torch.save turns one into a RuntimeError."""
    while error is not None and not isinstance(error, KeyboardInterrupt | SystemExit):
        error = error.__cause__ or error.__context__
    return error is not None
