"""A training that is not ours before it starts: its place in a study, its baseline, its change.

What the baseline did is the plan that every other arm is held to: the steps it made and the states
it kept. An arm may differ from it in one declared change, as any arm of ours. Everything here only
reads; `foreign` records.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import torch

from attention_kernels.testing.fault_names import FAULT_NAMES
from stability.analysis.pair_contract import recorded_axis
from stability.config.attentions import IMPLEMENTATIONS
from stability.config.command_study import CommandTrain
from stability.config.commands import check_held_out, is_command, training_config
from stability.config.convert import Place, nearest, to_dict
from stability.config.diff import diff
from stability.config.load import check_name
from stability.config.masking import masked_values, masked_words
from stability.config.roles import role_of
from stability.config.schema import BASELINE, Role
from stability.config.study import PolicyConfig
from stability.recorder.inside.attention import BACKENDS
from stability.recorder.launch import Asked
from stability.recorder.witnessed import looked_at
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.paths import RunPaths, StudyPaths
from stability.records.sealed_json import read_sealed

__all__ = ["ForeignRun", "check_attention_name", "check_free", "given_role", "plan_run"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRun:
    """One training of somebody's command, before it starts."""

    study: str
    folder: Path
    """The study's."""
    arm: str
    seed: int
    config: Mapping[str, Any]
    diff: Mapping[str, Sequence[Any]]
    axis: str
    role: Role
    asked: Asked
    words: Sequence[str] = ()
    """The command, with its placeholders; none if the training is the caller's own."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables that are set for it, as they are; in `config` what is secret is masked."""
    setup: str = ""
    """What builds its commit's checkout, as it is."""
    checkout: Path | None = None
    """The checkout of the user's that its commit is taken from, if it names one."""
    question: str = ""
    policy: Mapping[str, Any] = field(default_factory=lambda: to_dict(PolicyConfig()))

    @property
    def paths(self) -> RunPaths:
        """The run's files."""
        return RunPaths.for_run(self.folder, self.arm, self.seed)

    @property
    def baseline(self) -> RunPaths | None:
        """The run it is paired with."""
        is_baseline = self.arm == BASELINE
        return None if is_baseline else RunPaths.for_run(self.folder, BASELINE, self.seed)

    @property
    def is_kept(self) -> bool:
        """Whether the run is on record already, whole, with this config."""
        if not self.paths.manifest.exists():
            return False
        manifest = read_manifest(self.paths.manifest)
        return manifest.state in ENDED and not self.is_other(manifest)

    def is_other(self, manifest: Manifest) -> bool:
        """Whether a record is of another training: 1 and 1.0 are other words of a command."""
        was, words = masked_values(manifest.config), manifest.resolved.get("command", ())
        is_other = json.dumps(was, sort_keys=True) != json.dumps(
            masked_values(self.config), sort_keys=True
        )
        return is_other or bool(words and self.words and words != masked_words(self.words))


def plan_run(
    out: Path,
    study: str,
    arm: str,
    seed: int,
    training: Mapping[str, Any],
    *,
    asked: Asked,
    words: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    role: str = "",
    change: str = "",
    may_change: Sequence[str] = (),
    question: str = "",
) -> ForeignRun:
    """Check what can be known before the training starts, and return the run; writes nothing.

    `training` is what it is told (`config.commands`), `words` the command, if it is one, and `env`
    the variables that are set for it.
    ValueError for a name, seed or role that can't be; for an arm without its baseline on record;
    for a folder that holds another run. ContractError, also a ValueError, for an arm that differs
    in more than one change from the baseline.
    """
    check_name(study, Place(source="record: study"), ())
    check_name(arm, Place(source="record: arm"))
    check_attention_name(asked.attention)
    check_attention_name(asked.probe.get("candidate", ""))
    folder = out / study
    base = _plan_on_record(folder)
    given = given_role(role)
    if arm != BASELINE:
        _check_baseline(folder, study, arm, seed)
    steps, kept = _length(base, asked)
    held_out = _held_out(base, asked)
    config = training_config(
        training,
        steps=steps,
        snapshot_steps=kept,
        nudge=asked.nudge,
        attention=asked.attention,
        held_out=held_out,
        probe=asked.probe,
        deterministic=asked.deterministic,
        may_change=may_change,
    )
    differences = _differences(base, config, folder, arm)
    looks = () if arm == BASELINE else looked_at(RunPaths.for_run(folder, BASELINE, seed))
    asked = replace(
        asked,
        steps=steps,
        snapshot_steps=tuple(kept),
        looks=tuple(looks),
        held_out=held_out,
    )
    return ForeignRun(
        study=study,
        folder=folder,
        arm=arm,
        seed=seed,
        words=words,
        env=env or {},
        config=config,
        diff={path: list(values) for path, values in differences.items()},
        axis=recorded_axis(arm, differences, given, change),
        role=role_of(given, arm, differences, "", Place(source="record")),
        asked=asked,
        question=question,
    )


def _differences(
    base: Mapping[str, Any], config: Mapping[str, Any], folder: Path, arm: str
) -> dict[str, tuple[Any, Any]]:
    """Return what a run's config has otherwise than the study's baseline, which may have nothing.

    ValueError for another baseline.
    """
    differences = diff(base, config) if base else {}
    if arm == BASELINE and differences:
        path, (was, now) = next(iter(differences.items()))
        raise ValueError(
            f"record: {folder}: its {BASELINE} has {path} = {was!r}, got {now!r}; name another "
            "study, or another arm"
        )
    return differences


def check_free(run: ForeignRun, instead: str = "name another arm") -> None:
    """ValueError if the run's folder holds another run; `instead` is what to do, but for --out."""
    if not run.paths.manifest.exists():
        return
    manifest = read_manifest(run.paths.manifest)
    was = manifest.config
    if not is_command(was) or (manifest.state in ENDED and run.is_other(manifest)):
        raise ValueError(
            f"record: {run.paths.root}: holds another run of that arm; {instead}, or use --out for "
            "another folder"
        )


def _check_baseline(folder: Path, study: str, arm: str, seed: int) -> None:
    """ValueError unless the run that `arm` is to be paired with is on record, whole."""
    manifest = RunPaths.for_run(folder, BASELINE, seed).manifest
    if not manifest.exists():
        raise ValueError(
            f"record: {BASELINE}, seed {seed}, of study {study} must be on record before {arm}; "
            f"record it first: `--study {study} --arm {BASELINE} --seed {seed}`"
        )
    state = read_manifest(manifest).state
    if state not in ENDED:
        raise ValueError(
            f"record: {BASELINE}, seed {seed}, of study {study} must have finished, is {state}"
        )


def _length(base: Mapping[str, Any], asked: Asked) -> tuple[int, list[int]]:
    """Return how many updates a run makes, 0 if that is not known, and the states it keeps.

    Those of the study's first run are the plan. ValueError where others are asked for.
    """
    if not base:
        if asked.steps and not asked.snapshot_steps:
            # written down: a ladder reads an early step among those that are planned
            return asked.steps, CommandTrain(steps=asked.steps).planned_snapshots()[1:]
        return asked.steps, list(asked.snapshot_steps)
    planned = base["train"]
    for name, now in (("steps", asked.steps), ("snapshot_steps", list(asked.snapshot_steps))):
        if now and now != planned[name]:
            raise ValueError(
                f"record: {name} must be those of the study's first run, {planned[name]}, got {now}"
            )
    return planned["steps"], list(planned["snapshot_steps"])


def _held_out(base: Mapping[str, Any], asked: Asked) -> str:
    """Return what is held out, as in the study's first run; ValueError where another is asked."""
    given = check_held_out(asked.held_out)
    planned = base.get("held_out", "") if base else given
    if given and given != planned:
        was = repr(planned) if planned else "not given"
        raise ValueError(
            f"record: held_out must be that of the study's first run, {was}, got {given!r}"
        )
    return planned


def check_attention_name(name: str) -> None:
    """ValueError unless `name` is empty, or may take the place of a script's own attention."""
    name, plus, fault = name.partition("+")
    kind, _, profile = name.partition(":")
    if plus and fault not in FAULT_NAMES:
        raise ValueError(
            f"attention {name}+{fault}: what follows + must be a planted fault, got {fault!r}; "
            f"nearest: {nearest(fault, FAULT_NAMES)}"
        )
    if plus and kind == "sdpa":
        raise ValueError(
            f"attention {name}+{fault}: a fault must be planted on another attention than "
            "PyTorch's, such as flash:fa2"
        )
    if kind == "sdpa" and profile not in BACKENDS:
        raise ValueError(
            f"attention must be one of {', '.join(f'sdpa:{each}' for each in BACKENDS)}, another "
            f"of stability's or MODULE:FUNCTION, got {name!r}"
        )
    if name and kind in IMPLEMENTATIONS and kind != "sdpa":
        from stability.probe.attention_registry import resolve_attention  # heavy

        resolve_attention(name, torch.device("cpu"))
    elif name and kind not in IMPLEMENTATIONS and not profile:
        raise ValueError(
            f"attention must be registered or MODULE:FUNCTION, got {name!r}; nearest: "
            f"{nearest(name, IMPLEMENTATIONS)}"
        )


def given_role(role: str) -> Role | None:
    """Return the role of that name, None for an empty one; ValueError for another word."""
    if not role:
        return None
    if role not in get_args(Role):
        raise ValueError(
            f"record: role must be a role, got {role!r}; nearest: {nearest(role, get_args(Role))}"
        )
    return role  # pyright: ignore[reportReturnType] it is one of them


def _plan_on_record(folder: Path) -> dict[str, Any]:
    """Return the baseline's config of the study in `folder`; empty before it is recorded."""
    path = StudyPaths(folder).study
    if not path.exists():
        return {}
    base = read_sealed(path, "`stability record`")["config"]["base"]
    if not is_command(base):
        raise ValueError(
            f"record: {folder}: holds a study of `stability run`; name another study, or use --out "
            "for another folder"
        )
    return base
