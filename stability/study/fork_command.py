"""Forks of a command: from a checkpoint of its own it goes on twice, as it was and changed.

What the script has saved is all there is of the run's state, and only the script knows which step
that is. So the fork is paired with the run that goes on unchanged from the same checkpoint, not
with the parent: both are arms of a study in `forks/<name>`. Leaves out how a command is recorded
(`foreign`) and how far the two come apart (`fork.fork_drifts`).
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stability.callbacks.study_observer import StudyObserver
from stability.config.command_study import CommandConfig, CommandStudy
from stability.config.command_template import as_template, as_texts, with_dots
from stability.config.commands import attention_name
from stability.config.convert import Place, from_mapping
from stability.config.flags import parse_flags
from stability.config.load import check_name
from stability.config.masking import has_masked
from stability.config.schema import BASELINE
from stability.recorder.witnessed import looked_at
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import read_sealed
from stability.study.foreign import measure_study
from stability.study.foreign_plan import ForeignRun, check_free
from stability.study.fork_folder import fork_name, fork_place
from stability.study.run_commands import folder_of, plan_commands, record_planned

__all__ = ["FORK", "plan_command_fork", "run_command_fork"]

FORK = "fork"
"""The name of the arm beside the baseline, which goes on unchanged."""

_SETTLED = {
    "command": "a fork goes on with the run's own",
    "setup": "a fork goes on with the run's own",
    "start": "both runs go on from one, --start",
    "train": "--until says how many updates both make",
    "role": "a fork has none",
    "change": "--change declares it",
}
"""What `--set` does not take, and why."""

_SAME = ("env", "python", "ref", "setup", "held_out", "probe", "deterministic")
"""What both runs have of the parent's config; its nudge was of a start that lies behind them."""


def plan_command_fork(
    parent: RunPaths,
    start: str,
    changes: Mapping[str, Any],
    *,
    resume: str = "",
    change: str = "",
    name: str = "",
    until: int = 0,
) -> list[ForeignRun]:
    """Return the two runs that go on from the checkpoint `start`: unchanged, and with `changes`.

    `resume` are the words by which the command takes `{resume}`, if its own do not have it. Each
    makes `until` updates; 0: as many as the unchanged one makes. Writes nothing. ValueError for a
    run without a command, a command that can't resume, a checkpoint that is not there, changes
    that are not one, and a name that another fork has.
    """
    if until < 0:
        raise ValueError(f"fork: until must be >= 0, got {until}")
    manifest = read_manifest(parent.manifest)
    changed = _changed(changes, is_of_study="setup" in manifest.config)
    values = {
        **_continued(parent, manifest, resume, changed),
        "start": os.path.abspath(start),
        "train": {"steps": until or 1},
    }
    if has_masked(values):
        raise ValueError(
            f"fork: {parent.root}: its command holds a password or key, which is not on record; "
            "let the script read it from a variable of the shell, which a fork is given too"
        )
    base = from_mapping(CommandConfig, values, Place(source="fork"))
    identity = [parent.arm, base.start, base.command, change, until, changed]
    name = name or fork_name(f"{parent.arm}.{Path(start).stem}", changed, identity)
    check_name(name, Place(source="fork: name"))
    study = CommandStudy(
        name=name,
        question=f"What does the change do to {parent.arm} from {Path(start).name} on?",
        base=base,
        arms={BASELINE: {}, FORK: {**changed, **({"change": change} if change else {})}},
        seeds=(parent.seed,),
    )
    runs = [run if until else _open_ended(run) for run in plan_commands(study, fork_place(parent))]
    _check_folder(runs)
    return runs


def run_command_fork(runs: Sequence[ForeignRun], updates: int, observer: StudyObserver) -> bool:
    """Record the two runs, or keep those on record; return whether both count.

    `updates` is about how many they make. The fork is not run where the unchanged one has failed.
    ValueError if a commit can't be checked out.
    """
    folders = [folder_of(run) for run in runs]
    for index, (planned, folder) in enumerate(zip(runs, folders, strict=True), start=1):
        run = _as_long(planned)
        if run.is_kept:
            continue
        about = run.asked.steps or max(1, updates)
        observer.run_started(index, len(runs), run.arm, run.seed, about)
        state, message = record_planned(run, folder, observer)
        observer.run_ended(run.arm, run.seed, state, message)
        if state not in ENDED:
            return False
        for note in measure_study(run):
            observer.run_noted(run.arm, run.seed, note)
    return True


def _changed(changes: Mapping[str, Any], *, is_of_study: bool) -> dict[str, Any]:
    """Return what the fork's arm has over the base: flags with their whole names, as recorded."""
    for key, reason in _SETTLED.items():
        if key in changes:
            raise ValueError(f"fork: {key} must not be set: {reason}")
    if "flags" not in changes:
        return dict(changes)
    if not isinstance(changes["flags"], Mapping):
        raise ValueError(
            f"fork: flags must be set one by one, as in --set flags.lr=0.1, got {changes['flags']}"
        )
    flags = with_dots(changes["flags"])
    return {**changes, "flags": flags if is_of_study else as_texts(flags)}


def _continued(
    parent: RunPaths, manifest: Manifest, resume: str, changes: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the config of the run that goes on unchanged, but for its start and its length."""
    config: dict[str, Any] = {**manifest.config}
    resuming = parse_flags(_words(resume))
    if "setup" in config:  # of a study's file, whose command is on record as it is written there
        command = config["program"]
        flags = {key: value for key, value in config["flags"].items() if key not in resuming}
    else:
        words = manifest.resolved.get("command", [])
        if not words:
            raise ValueError(
                f"fork: {parent.root}: its command is not on record, as of a script that calls "
                "stability.record or of an older version; use `stability record -- COMMAND`"
            )
        command, flags = as_template(words, changes.get("flags", {}), resuming)
    if "{resume}" not in command:
        if "{resume}" not in resume:
            raise ValueError(
                f"fork: {parent.root}: its command has no {{resume}}; say how it takes a "
                'checkpoint, as in --resume="--resume {resume}"'
            )
        command = f"{command} {resume}"
    same = {key: config.get(key, manifest.resolved.get(key)) for key in _SAME}
    return {
        # the fork's own would be another one
        "command": command.replace("{arm}", parent.arm),
        "flags": flags,
        "attention": attention_name(config["attention"]),
        **{key: value for key, value in same.items() if value is not None},
    }


def _words(resume: str) -> list[str]:
    try:
        return shlex.split(resume)
    except ValueError as error:
        raise ValueError(f"fork: resume must be words as of a shell, got {resume!r}") from error


def _open_ended(run: ForeignRun) -> ForeignRun:
    """Return the run without a number of updates: the script ends by itself."""
    length = {"steps": 0, "snapshot_steps": []}
    return replace(
        run,
        config={**run.config, "train": length},
        asked=replace(run.asked, steps=0, snapshot_steps=()),
    )


def _as_long(run: ForeignRun) -> ForeignRun:
    """Return the run with the updates, states and looks of the unchanged one, once it has ended."""
    unchanged = RunPaths.for_run(run.folder, BASELINE, run.seed)
    if not unchanged.manifest.exists():
        return run
    manifest = read_manifest(unchanged.manifest)
    if manifest.state not in ENDED:
        return run
    length = manifest.config["train"]  # pyright: ignore[reportGeneralTypeIssues] a command's
    asked = replace(
        run.asked,
        steps=length["steps"],
        snapshot_steps=tuple(length["snapshot_steps"]),
        looks=tuple(looked_at(unchanged)) if run.arm == FORK else (),
    )
    return replace(run, config={**run.config, "train": length}, asked=asked)


def _check_folder(runs: Sequence[ForeignRun]) -> None:
    """ValueError if the folder of the fork's name holds another fork."""
    try:
        for run in runs:
            check_free(_as_long(run))
        is_same = _is_planned(runs)
    except ValueError:
        is_same = False
    if not is_same:
        raise ValueError(
            f"fork: {runs[0].folder}: holds another fork; give --name, or move the folder away"
        )


def _is_planned(runs: Sequence[ForeignRun]) -> bool:
    """Whether the study that the runs belong to is of this fork, or has no run yet."""
    path = StudyPaths(runs[0].folder).study
    if not path.exists():
        return True
    content = read_sealed(path, "`stability fork`")
    planned = {arm["name"]: arm["diff"] for arm in content["arms"]}
    base, own = ({**x, "train": {}} for x in (content["config"]["base"], runs[0].config))
    return base == own and all(planned.get(run.arm, run.diff) == run.diff for run in runs)
