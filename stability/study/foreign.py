"""Studies of trainings that are not ours: each run is recorded by itself, its baseline first.

What the baseline did is the plan that every other arm is held to: the steps it made and the states
it kept. An arm may differ from it in one declared change, as any arm of ours, and is checked before
it starts and once it has ended. Leaves out how a training is watched (`recorder`).
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

from stability.analysis.pair_contract import (
    ContractError,
    check_batches,
    check_start,
    may_differ,
    recorded_axis,
)
from stability.config.commands import command_config, filled_in, is_command
from stability.config.convert import Place, nearest, to_dict
from stability.config.diff import diff, hash_without
from stability.config.load import check_name
from stability.config.roles import role_of
from stability.config.schema import BASELINE, Role
from stability.config.study import PolicyConfig
from stability.recorder.launch import Asked, Launched, environment_of, launch
from stability.recorder.spooled import Spooled, SpoolError, read_spool, read_state
from stability.recorder.writer import diverged_at, running_hashes, write_log, write_states
from stability.records.identity import environment_outside, hash_environment
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_log import read_text
from stability.records.metric_names import BATCH_HASH
from stability.records.paths import RunPaths, StudyPaths, list_runs
from stability.records.protocol import protocol_hash
from stability.records.run_files import RunFiles, read_run_snapshot
from stability.records.sealed_json import read_sealed, write_sealed
from stability.study.distances import update_distances
from stability.study.run import locked
from stability.study.window import freeze_window

__all__ = ["ForeignRun", "RunFailedError", "measure_study", "plan_run", "record_command"]


class RunFailedError(RuntimeError):
    """A recorded run does not count; its manifest says so too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ForeignRun:
    """One training of somebody's command, before it starts."""

    study: str
    folder: Path
    """The study's."""
    arm: str
    seed: int
    words: Sequence[str]
    """The command, with its placeholders."""
    config: Mapping[str, Any]
    diff: Mapping[str, Sequence[Any]]
    axis: str
    role: Role
    asked: Asked
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
        return manifest.state in ENDED and manifest.config == self.config


def plan_run(
    out: Path,
    study: str,
    arm: str,
    seed: int,
    words: Sequence[str],
    *,
    env: Mapping[str, str],
    asked: Asked,
    role: str = "",
    change: str = "",
    may_change: Sequence[str] = (),
    question: str = "",
) -> ForeignRun:
    """Check what can be known before the command starts, and return the run; writes nothing.

    ValueError for a name, seed or role that can't be; for an arm without its baseline on record;
    for a folder that holds another run. ContractError, also a ValueError, for an arm that differs
    in more than one change from the baseline.
    """
    check_name(study, Place(source="record: study"), ())
    check_name(arm, Place(source="record: arm"))
    folder = out / study
    base = _plan_on_record(folder)
    given = _given_role(role)
    if arm != BASELINE:
        _check_baseline(folder, study, arm, seed)
    steps, kept = _length(base, asked)
    config = command_config(
        words, env, steps=steps, snapshot_steps=kept, nudge=asked.nudge, may_change=may_change
    )
    differences = diff(base, config) if base else {}
    if arm == BASELINE and differences:
        path, (was, now) = next(iter(differences.items()))
        raise ValueError(
            f"record: {folder}: its {BASELINE} has {path} = {was!r}, got {now!r}; name another "
            "study, or another arm"
        )
    asked = replace(asked, steps=steps, snapshot_steps=tuple(kept))
    return ForeignRun(
        study=study,
        folder=folder,
        arm=arm,
        seed=seed,
        words=words,
        config=config,
        diff={path: list(values) for path, values in differences.items()},
        axis=recorded_axis(arm, differences, given, change),
        role=role_of(given, arm, differences, "", Place(source="record")),
        asked=asked,
        question=question,
    )


def record_command(run: ForeignRun) -> Manifest:
    """Run the command, record what it trains, and return the final manifest.

    RunFailedError, one sentence, if what came of it does not count: the manifest says why.
    KeyboardInterrupt if the user interrupts. RunConflictError if another process records the run.
    """
    _check_free(run)
    with locked(run.paths):
        for left in run.paths.root.glob(".spool-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        spool = Path(tempfile.mkdtemp(prefix=".spool-", dir=run.paths.root))
        try:
            return _record(run, spool)
        finally:
            shutil.rmtree(spool, ignore_errors=True)


def _record(run: ForeignRun, spool: Path) -> Manifest:
    variables = environment_of(run.asked, spool, run.config["env"])
    files = RunFiles(run.paths, _first_manifest(run, variables))
    files.update()
    values = {"seed": run.seed, "arm": run.arm, "out": run.paths.root.resolve()}
    try:
        launched = launch([filled_in(word, values) for word in run.words], variables)
    except KeyboardInterrupt:
        files.update(state="interrupted")
        raise
    except ValueError as error:
        files.update(state="failed", message=str(error))
        raise
    try:
        spooled = read_spool(spool)
        _check_end(run, spooled, launched)
        return _write(run, files, spooled)
    except (ContractError, SpoolError, ValueError) as error:
        said = f"pair contract: {error}" if isinstance(error, ContractError) else str(error)
        if isinstance(error, SpoolError) and launched.code:
            said = _died(launched)
        files.update(state="failed", message=said)
        raise RunFailedError(f"{run.arm}, seed {run.seed}: {said}") from error


def _write(run: ForeignRun, files: RunFiles, spooled: Spooled) -> Manifest:
    environment = {
        **files.manifest.environment,
        **spooled.environment,
        **{f"module.{name}": sha256 for name, sha256 in spooled.modules.items()},
    }
    hashes = {
        **files.manifest.hashes,
        "environment": hash_environment(environment),
        "init_weights": spooled.init,
    }
    config = _with_steps(run, spooled)
    resolved = {
        "names": list(spooled.names),
        "models": list(spooled.owners),
        "ranks": spooled.world,
        "notes": list(spooled.notes),
    }
    hashes["config_less_axis"] = hash_without(config, run.diff)
    files.update(
        config=config, environment=environment, hashes=hashes, resolved=resolved, until=spooled.step
    )
    _check_seeds(run, spooled)
    baseline = run.baseline
    if baseline:
        check_start(read_manifest(baseline.manifest), files.manifest)
    write_log(files, spooled)
    _check_nudge(run, spooled)
    final = write_states(files, spooled, baseline, lambda step: _check_batches(run, step))
    batches = read_text(files.paths.metrics, BATCH_HASH)
    if spooled.step in batches:
        hashes["batches"] = batches[spooled.step]
        _check_batches(run, spooled.step)
    diverged = diverged_at(spooled.updates)
    files.update(
        state="finished" if diverged is None else "diverged",
        message="" if diverged is None else f"the loss is not finite from step {diverged} on",
        step=spooled.step,
        hashes={**hashes, "final_weights": final},
    )
    _write_study(run, config)
    return files.manifest


def _first_manifest(run: ForeignRun, variables: Mapping[str, str]) -> Manifest:
    found = environment_outside(variables)
    return Manifest(
        study=run.study,
        arm=run.arm,
        seed=run.seed,
        axis=run.axis,
        config=dict(run.config),  # pyright: ignore[reportArgumentType] a command's
        diff={path: list(values) for path, values in run.diff.items()},
        environment=found,
        resolved={},
        hashes={
            "config_less_axis": hash_without(run.config, run.diff),
            "environment": hash_environment(found),
            "protocol": protocol_hash(run.folder),
        },
        state="running",
        step=0,
        message="",
    )


def _with_steps(run: ForeignRun, spooled: Spooled) -> dict[str, Any]:
    """Return the config with the steps that the first baseline has made, which are the plan."""
    if run.config["train"]["steps"]:
        return dict(run.config)
    kept = sorted(step for step in spooled.states if step)
    return {**run.config, "train": {"steps": spooled.step, "snapshot_steps": kept}}


def _check_end(run: ForeignRun, spooled: Spooled, launched: Launched) -> None:
    if launched.code:
        raise ValueError(_died(launched))
    planned = run.config["train"]["steps"]
    if not spooled.has_end or (planned and spooled.step != planned):
        how = "ended" if spooled.has_end else "was killed"
        of = f" of {planned}" if planned else ""
        raise ValueError(f"training {how} after {spooled.step} updates{of}")


def _died(launched: Launched) -> str:
    said = " | ".join(line for line in launched.last_lines.splitlines()[-3:] if line.strip())
    return f"the command ended with exit code {launched.code}: {said or 'it printed nothing'}"


def _check_batches(run: ForeignRun, step: int) -> None:
    if run.baseline is None or may_differ("batches", run.diff):
        return
    own, other = (read_text(x.metrics, BATCH_HASH) for x in (run.paths, run.baseline))
    # what was not seen of both proves nothing; `verify` says so
    if own.keys() == other.keys():
        check_batches(run.baseline, run.paths, min(step, max(own, default=0)))


def _check_nudge(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if the first update shows no trace of the nudge: the weights were set anew."""
    if run.baseline is None or not run.asked.nudge[0] or 1 not in spooled.states:
        return
    other = read_run_snapshot(run.baseline, 1)
    own = read_state(spooled.states[1])
    if all(name in own and own[name].equal(value) for name, value in other.items()):
        raise ValueError(
            "the nudge left no trace: after the first update all weights are the baseline's; the "
            "script sets its weights after its first forward pass"
        )


def _check_seeds(run: ForeignRun, spooled: Spooled) -> None:
    """ValueError if another seed of the arm was the same run: it would count as a repetition."""
    own = list(running_hashes(spooled.updates))
    for other in list_runs(run.folder):
        if other.arm != run.arm or other.seed == run.seed or not other.manifest.exists():
            continue
        manifest = read_manifest(other.manifest)
        if manifest.state not in ENDED or manifest.hashes.get("init_weights") != spooled.init:
            continue
        batches = read_text(other.metrics, BATCH_HASH)
        if own and own[-1] and batches.get(len(own)) == own[-1]:
            raise ValueError(
                f"seed {run.seed} must be another run than seed {other.seed}, has the same start "
                "and the same batches: the command does not take its seed; put {seed} into it"
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
        return asked.steps, list(asked.snapshot_steps)
    planned = base["train"]
    for name, now in (("steps", asked.steps), ("snapshot_steps", list(asked.snapshot_steps))):
        if now and now != planned[name]:
            raise ValueError(
                f"record: {name} must be those of the study's first run, {planned[name]}, got {now}"
            )
    return planned["steps"], list(planned["snapshot_steps"])


def _given_role(role: str) -> Role | None:
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


def _check_free(run: ForeignRun) -> None:
    """ValueError if the run's folder holds another run."""
    if not run.paths.manifest.exists():
        return
    manifest = read_manifest(run.paths.manifest)
    was = manifest.config
    if not is_command(was) or (manifest.state in ENDED and was != run.config):
        raise ValueError(
            f"record: {run.paths.root}: holds another run of that arm; name another arm, or use "
            "--out for another folder"
        )


def _write_study(run: ForeignRun, config: Mapping[str, Any]) -> None:
    """Add the run's arm and seed to the study's plan."""
    path = StudyPaths(run.folder).study
    if path.exists():
        content = read_sealed(path, "`stability record`")
    else:
        content = {"config": _study_config(run, config), "arms": []}
    seeds = content["config"]["seeds"]
    if run.seed not in seeds:
        content["config"]["seeds"] = [*seeds, run.seed]
    if run.question:
        content["config"]["question"] = run.question
    entry = {
        "name": run.arm,
        "axis": run.axis,
        "diff": {name: list(values) for name, values in run.diff.items()},
        "role": run.role,
        "until": config["train"]["steps"],
    }
    others = [arm for arm in content["arms"] if arm["name"] != run.arm]
    names = [arm["name"] for arm in content["arms"]]
    place = names.index(run.arm) if run.arm in names else len(others)
    content["arms"] = [*others[:place], entry, *others[place:]]
    write_sealed(path, content)


def _study_config(run: ForeignRun, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "name": run.study,
        "question": run.question or f"Does what differs in {run.study} matter?",
        "base": dict(config),
        "seeds": [],
        "yardstick": "",
        "early_step": 0,
        "policy": dict(run.policy),
    }


def measure_study(run: ForeignRun) -> list[str]:
    """Measure the distances between the arms of the run's seed; return what could not be."""
    found = {paths.arm: paths for paths in list_runs(run.folder) if paths.seed == run.seed}
    notes: list[str] = []
    update_distances(run.folder, run.seed, found, lambda arm, text: notes.append(f"{arm}: {text}"))
    freeze_window(run.folder)
    return notes
