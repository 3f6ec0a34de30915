"""A run before it is trained: its arm and seed, its folder, its lock, and what is there already.

How it is trained is left to `train_run`.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from stability.analysis.pair_contract import start_breach
from stability.callbacks.study_observer import StudyObserver
from stability.config.arms import Arm, with_seed
from stability.config.convert import to_dict
from stability.config.schema import ArmConfig
from stability.records.atomic_files import remove
from stability.records.identity import (
    environment,
    is_compared,
    is_module,
    is_of_process,
    is_on_record,
    may_be_missing,
    recorded_modules,
)
from stability.records.manifest import (
    ENDED,
    Manifest,
    RecordedFork,
    has_ended,
    read_manifest,
    write_manifest,
)
from stability.records.module_sources import edited_modules
from stability.records.paths import RunPaths, checkpoint_steps, strange_files
from stability.records.run_files import damage
from stability.records.run_lock import hold
from stability.records.sealed_json import DamagedError

__all__ = [
    "Fork",
    "Run",
    "RunConflictError",
    "check_existing",
    "check_kept",
    "has_ended",
    "locked",
    "needs_no_training",
    "refuse_other_process",
    "reopen",
    "snapshot_steps_of",
]


class RunConflictError(ValueError):
    """A run's folder holds another run than the one asked for, or is in use."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fork:
    """Where a run leaves its baseline, and the step up to which it trains."""

    at: int
    until: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One training: an arm with a seed, and the folder of its records."""

    study: str
    arm: Arm
    axis: str
    seed: int
    paths: RunPaths
    baseline: RunPaths | None
    """The paired run; None for the baseline itself."""
    fork: Fork | None = None
    """Set if the run goes on from its baseline's state."""
    protocol: str = ""
    """The hash of the protocol that it is trained under; empty where none was sealed."""

    @property
    def fork_record(self) -> RecordedFork:
        """The manifest's entry about the fork; `from` is relative, so that both may be moved."""
        if self.fork is None or self.baseline is None:
            return {}
        parent = os.path.relpath(self.baseline.root.resolve(), self.paths.root.resolve())
        return {"from": parent, "at": self.fork.at, "until": self.fork.until}

    @property
    def last_step(self) -> int:
        """The step at which the training stops."""
        return self.fork.until if self.fork else self.arm.until

    @property
    def config(self) -> ArmConfig:
        """The arm's config with this seed."""
        return with_seed(self.arm.config, self.seed)


def snapshot_steps_of(run: Run) -> set[int]:
    """Return the steps at which a run keeps its weights."""
    return {*run.config.train.planned_snapshots(), run.last_step}


def check_existing(run: Run, *, trains_here: bool = True) -> list[str]:
    """Return what is damaged of a run that has ended, which `reopen` then sends back to training.

    RunConflictError if the run's directory holds another run, or one of an attention of the user's
    whose source is another one now. A run that goes on from a checkpoint needs all sources that it
    was begun with: of one that `trains_here` they are compared.
    ValueError as `assemble.describe_attention`.
    """
    manifest, torn = _manifest_of(run.paths)
    if manifest is None:
        return torn
    for name, asked in (("study", run.study), ("arm", run.arm.name), ("seed", run.seed)):
        _refuse_difference(run, name, getattr(manifest, name), asked)
    _refuse_difference(run, "config", manifest.config, to_dict(run.config))
    _refuse_difference(run, "fork", manifest.fork, run.fork_record)
    # a manifest from before arms could end early says nothing: its run trained the whole length
    _refuse_difference(run, "until", manifest.until or run.config.train.steps, run.last_step)
    damaged = damage(run.paths) if manifest.state in ENDED else []
    if trains_here and (damaged or manifest.state not in ENDED):
        _refuse_other_sources(run, manifest)
    elif manifest.state in ENDED:
        _refuse_edited(run, manifest, is_here=trains_here)
    return damaged


def check_kept(run: Run, *, baseline_is_kept: bool) -> None:
    """RunConflictError if `run` has ended, and is no pair with its baseline as it is or will be.

    So it is where the baseline was removed to be trained anew by other code or elsewhere.
    """
    if run.baseline is None or not has_ended(run.paths):
        return
    manifest = read_manifest(run.paths.manifest)
    if baseline_is_kept and has_ended(run.baseline):
        breach = start_breach(read_manifest(run.baseline.manifest), manifest, manifest.diff)
        if breach:
            raise RunConflictError(
                f"{run.paths.root}: {breach}; use --out for another folder, or move this one away "
                "to train it anew"
            )
        return
    # switches and modules are those of the process that trains
    for key, was, now in _other_entries(manifest.environment, environment()):
        if not is_of_process(key):
            raise RunConflictError(
                f"{run.paths.root}: was trained with environment.{key} = {was!r}, and its baseline "
                f"would be with {now!r}: no pair; use --out for another folder, or "
                "move this one away to train it anew"
            )


def _other_entries(
    was: Mapping[str, Any], now: Mapping[str, Any]
) -> Iterator[tuple[str, Any, Any]]:
    """Give each entry in which two environments may not differ, and do: its name, both values."""
    for key in sorted({*was, *now}):
        # a module that is new has run its code, and one that is gone has not
        is_free = may_be_missing(key) and not is_module(key) and (key not in was or key not in now)
        # a run from before an entry was listed says nothing of it
        is_free |= not is_compared(key)
        is_free |= not (is_on_record(key, was, now) and is_on_record(key, now, was))
        if was.get(key) != now.get(key) and not is_free:
            yield key, was.get(key), now.get(key)


def _manifest_of(paths: RunPaths) -> tuple[Manifest | None, list[str]]:
    """Return a run's manifest, or why there is none: nothing if the run was never begun.

    RunConflictError where that leaves open whose files the folder holds.
    """
    torn: list[str] = []
    if paths.manifest.exists():
        try:
            return read_manifest(paths.manifest), torn
        except DamagedError as error:
            torn.append(str(error))
        except ValueError as error:  # not to be read now, or of another version: it may be whole
            raise RunConflictError(f"{error}; use --out for another folder") from error
    strangers = strange_files(paths)
    if strangers:
        raise RunConflictError(
            f"{paths.root}: holds files but no whole manifest ({strangers[0]}); "
            "use --out for another folder"
        )
    return None, torn


def reopen(run: Run, damaged: Sequence[str], observer: StudyObserver) -> None:
    """Take back that `run` has ended, since its records are `damaged`: it trains once more.

    It goes on from a checkpoint before the damage, or anew where there is none, to the same bits.
    RunConflictError if another process is doing so.
    """
    for sentence in damaged:
        observer.run_noted(run.arm.name, run.seed, sentence)
    with locked(run.paths):
        try:
            manifest = read_manifest(run.paths.manifest)
        except DamagedError:
            remove(run.paths.manifest)
            return
        write_manifest(run.paths.manifest, replace(manifest, state="interrupted"))


def needs_no_training(run: Run, observer: StudyObserver) -> bool:
    """Whether `run` has ended already or lacks its baseline; if so, tell `observer` which."""
    if has_ended(run.paths):
        observer.run_ended(run.arm.name, run.seed, "finished", "kept")
        return True
    if run.baseline is not None and not has_ended(run.baseline):
        observer.run_ended(run.arm.name, run.seed, "skipped", "its baseline did not finish")
        return True
    return False


@contextmanager
def locked(paths: RunPaths) -> Iterator[None]:
    """Lock a run's folder for this process; the lock of a killed process is released.

    RunConflictError if another process keeps it.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(hold(paths))
        except BlockingIOError:
            raise RunConflictError(
                f"{paths.root}: another process is training this run; wait for it, or stop it"
            ) from None
        yield


def _refuse_other_sources(run: Run, manifest: Manifest) -> None:
    """Refuse to go on where the machine, the attention or its source is another one than before.

    As long as the run has no checkpoint of its own, all may be mended: it is trained anew, and held
    against its baseline.
    """
    if max(checkpoint_steps(run.paths), default=0) <= (run.fork.at if run.fork else 0):
        return
    from stability.study.assemble import describe_attention  # heavy: Lightning

    # first, since the user's module, which this imports, may change the process
    resolved = describe_attention(run.config)
    now = environment()
    for name, key in (("attention_kernels", "kernel_source"), ("stability", "package_source")):
        _refuse_source(run, manifest, name, manifest.environment.get(key), now[key])
    # switches and modules are those of the process that trains: see `refuse_other_process`
    was = {key: value for key, value in manifest.environment.items() if not is_of_process(key)}
    _refuse_environment(run, was, {key: now[key] for key in now if not is_of_process(key)})
    name = resolved["implementation"]
    _refuse_source(run, manifest, name, manifest.resolved.get("source"), resolved.get("source"))
    _refuse_difference(run, "attention", manifest.resolved, resolved)


def _refuse_edited(run: Run, manifest: Manifest, *, is_here: bool) -> None:
    """RunConflictError if a run that has ended was of another source of the user's own.

    It would be kept, and the answer be that of a kernel that is no more. Where the attention can't
    be had, as it may be where other machines train, nothing is said.
    """
    # modules that it imports, and others of the user's, have their hashes too
    edited = edited_modules(recorded_modules(manifest.environment), [Path.cwd()])
    if edited:
        raise RunConflictError(
            f"{run.paths.root}: has ended, and {edited[0]} was edited since; use --out for another "
            "folder, or another name of the study, to train with it as it is; put the file back to "
            "keep what there is"
        )
    was = manifest.resolved.get("source")
    if not was:
        return
    from stability.study.assemble import describe_attention  # heavy: Lightning

    try:
        now = describe_attention(run.config).get("source")
    except ValueError:
        if is_here:
            raise
        return
    if now and was != now:
        raise RunConflictError(
            f"{run.paths.root}: has ended, trained by {manifest.resolved['implementation']} as its "
            f"source was then (SHA-256 {was[:12]}, now {now[:12]}); use --out for another folder, "
            f"or another name of the study, to train with it as it is; put that source back to "
            "keep what there is"
        )


def refuse_other_process(run: Run, manifest: Manifest, now: Mapping[str, Any]) -> None:
    """RunConflictError if this process has other switches or modules than the run's first one."""
    was = {key: value for key, value in manifest.environment.items() if is_of_process(key)}
    _refuse_environment(run, was, {key: now[key] for key in now if is_of_process(key)})


def _refuse_environment(run: Run, was: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key, before, after in _other_entries(was, now):
        _refuse_difference(run, f"environment.{key}", before, after)


def _refuse_source(run: Run, manifest: Manifest, name: str, was: Any, now: Any) -> None:
    if was and now and was != now:
        raise RunConflictError(
            f"{run.paths.root}: was stopped at step {manifest.step}, trained by {name} as its "
            f"source was then (SHA-256 {was[:12]}, now {now[:12]}); put that source back to go "
            f"on, use --out for another folder, or move {run.paths.root} away to train it anew"
        )


def _refuse_difference(run: Run, where: str, found: object, asked: object) -> None:
    if isinstance(found, dict) and isinstance(asked, dict):
        for key in sorted({*found, *asked}):
            _refuse_difference(run, f"{where}.{key}", found.get(key), asked.get(key))
    elif found != asked:
        raise RunConflictError(
            f"{run.paths.root}: holds a run with {where} = {found!r}, asked for {asked!r}; "
            "use --out for another folder, or move this one away"
        )
