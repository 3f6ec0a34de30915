"""Records trainings that are not ours: each run by itself, its baseline first.

A run is held against its plan (`foreign_plan`) once it has ended, and against its baseline step by
step. Leaves out how a training is watched (`recorder`).
"""

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stability.analysis.launch_contract import launch_lines
from stability.analysis.pair_contract import ContractError, check_start
from stability.analysis.start_contract import start_part_lines
from stability.config.commands import filled_in
from stability.config.diff import hash_without
from stability.config.masking import masked_words, without_secrets
from stability.recorder.launch import Launched, environment_of, launch
from stability.recorder.launched import GivenCommand, launch_record
from stability.recorder.probed import write_probed
from stability.recorder.spool_tail import telling_updates
from stability.recorder.spooled import Spooled, dead_rank, read_spool, read_state, refusal
from stability.recorder.witnessed import recorded_witness, state_of_code, witness_notes
from stability.recorder.writer import Baseline, RunWriter, stopped
from stability.records.identity import environment_outside, hash_environment
from stability.records.manifest import Manifest, read_manifest
from stability.records.metric_log import MetricLog
from stability.records.metric_names import BATCH_INPUTS, BATCH_LABELS, BATCH_ORDER
from stability.records.paths import list_runs, snapshot_steps
from stability.records.protocol import protocol_hash
from stability.records.run_files import RunFiles
from stability.records.snapshots import hash_state
from stability.study.constants import find_constants, moved_constants, without
from stability.study.distances import update_distances
from stability.study.foreign_checks import (
    check_attention,
    check_end,
    check_final,
    check_nudge,
    check_same_batches,
    check_seeds,
    check_sources,
)
from stability.study.foreign_plan import ForeignRun, check_free
from stability.study.given_start import (
    GIVEN,
    check_dtypes,
    check_given,
    start_notes,
    start_variables,
)
from stability.study.late_start import checkpoint_entry
from stability.study.recorded_plan import write_study
from stability.study.rerun_notes import rerun_notes
from stability.study.run import locked
from stability.study.window import freeze_window

__all__ = [
    "OpenRun",
    "RunFailedError",
    "commanded",
    "measure_seed",
    "measure_study",
    "opened",
    "record_command",
    "spool_below",
    "variables_of",
    "writing",
]


Advanced = Callable[[int, float | None], None]
"""Told how many updates a run has made, and of the last one's loss if it was seen."""


class RunFailedError(RuntimeError):
    """A recorded run does not count; its manifest says so too."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenRun:
    """A run whose folder is this process's, from before its training starts."""

    run: ForeignRun
    files: RunFiles
    writer: RunWriter
    spool: Path
    """Where the processes of the training leave what they see."""
    folder: Path | None = None
    """Where the command runs."""
    git: Mapping[str, str] = field(default_factory=dict)
    """Commit and changes of the script's folder before it started."""

    def write(self, command: GivenCommand | None = None) -> Manifest:
        """Write the record of a training that has ended by itself; return the final manifest.

        `command` is what was started; None where the training is the caller's own.
        RunFailedError, one sentence, if it does not count: the manifest says why.
        """
        try:
            spooled = read_spool(self.spool)
            check_end(self.run, spooled)
            check_attention(self.run, spooled)
            check_sources(self.run, spooled, self.folder)
            check_given(spooled)
            command = command or GivenCommand()
            launched = launch_record(spooled.launched, command)
            return _write(self.run, self.files, self.writer, spooled, self.git, launched)
        except ValueError as error:
            is_breach = isinstance(error, ContractError)
            raise self.failed(f"pair contract: {error}" if is_breach else str(error)) from error

    def failed(self, said: str) -> RunFailedError:
        """Write why the run does not count, and return the error that says it."""
        # a launcher ends with its command, and argparse with what it does not know
        said = without_secrets(said, self.run.words or sys.argv, self.run.env)
        stopped(self.files, "failed", said)
        return RunFailedError(f"{self.run.arm}, seed {self.run.seed}: {said}")


@contextmanager
def opened(
    run: ForeignRun, variables: Mapping[str, str], folder: Path | None = None
) -> Iterator[OpenRun]:
    """Hold a run's folder while it trains under these variables; the spool is gone afterwards.

    RunConflictError if another process records the run, ValueError if another one is on record, and
    for another checkpoint than the baseline's, which the manifest then says too.
    """
    check_free(run)
    found = environment_outside(variables)
    with locked(run.paths):
        try:
            found = {**found, **checkpoint_entry(run)}
        except ValueError as error:
            stopped(RunFiles(run.paths, _first_manifest(run, found)), "failed", str(error))
            raise
        for left in run.paths.root.glob(".spool-*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        spool = Path(tempfile.mkdtemp(prefix=".spool-", dir=run.paths.root))
        try:
            files = RunFiles(run.paths, _first_manifest(run, found))
            files.update()
            git = state_of_code(run.words or sys.argv[:1], folder)
            with writing(run, files, lambda step: check_same_batches(run, step)) as writer:
                yield OpenRun(
                    run=run, files=files, writer=writer, spool=spool, folder=folder, git=git
                )
        except KeyboardInterrupt:
            stopped(files, "interrupted")
            raise
        finally:
            shutil.rmtree(spool, ignore_errors=True)


def record_command(
    run: ForeignRun,
    *,
    folder: Path | None = None,
    output: Path | None = None,
    check_observer: bool = False,
    advanced: Advanced | None = None,
) -> Manifest:
    """Run the command, record what it trains, and return the final manifest.

    It runs in `folder`, here by default, and its output goes to the file `output`, or to ours. With
    `check_observer` it runs a second time, unobserved, and must end in the same bits. `advanced` is
    told of its updates while it runs.
    RunFailedError, one sentence, if what came of it does not count: the manifest says why.
    KeyboardInterrupt if the user interrupts. RunConflictError if another process records the run.
    """
    with commanded(run, folder=folder, output=output, advanced=advanced) as (record, command):
        manifest = record.write(command)
        return _checked(record, command, output) if check_observer else manifest


@contextmanager
def commanded(
    run: ForeignRun,
    *,
    folder: Path | None = None,
    output: Path | None = None,
    advanced: Advanced | None = None,
) -> Iterator[tuple[OpenRun, GivenCommand]]:
    """Run the command as `record_command`, and give what it has left before that is recorded."""
    values = {"seed": run.seed, "arm": run.arm, "out": run.paths.root.resolve()}
    variables = environment_of(run.asked, variables_of(run))
    with opened(run, variables, folder) as record:
        words = [filled_in(word, values) for word in run.words]
        variables |= start_variables(run, record.spool)
        spool = {"STABILITY_SPOOL": str(record.spool.resolve())}
        command = GivenCommand(run.words, words, values, variables)
        command.begin(folder)
        try:
            look = telling_updates(record.spool, advanced or (lambda step, loss: None))
            given = {**variables, **spool}
            launched = launch(words, given, folder=folder, output=output, meanwhile=look)
        except ValueError as error:
            record.failed(str(error))
            raise
        if launched.code:
            raise record.failed(died(launched, record.spool))
        yield record, command


def _checked(record: OpenRun, command: GivenCommand, output: Path | None) -> Manifest:
    """Run the command unobserved, and put both hashes of the last state on record."""
    with spool_below(record.spool.parent) as spool:
        alone = {"STABILITY_SPOOL": str(spool), "STABILITY_OBSERVES": "0"}
        said = spool / "output.txt" if output else None
        try:
            variables = {**(command.variables or {}), **alone}
            launched = launch(command.filled, variables, folder=record.folder, output=said)
            if launched.code:
                raise record.failed(f"unobserved, {died(launched, spool)}")
            spooled = read_spool(spool)
            check_end(record.run, spooled)
            last, names = read_state(spooled.states[spooled.step]), record.files.manifest.resolved
            unwatched = hash_state({name: last[name] for name in names["names"]})
        except (ValueError, KeyError) as error:
            raise record.failed(f"unobserved, its last state was not found: {error}") from error
    manifest = record.files.manifest
    watched = manifest.hashes["final_weights"]
    others = {str(rank): found for rank, found in spooled.rank_ends.items()}
    before = manifest.resolved["rank_ends"]
    # what differs on the first rank too is no matter of another one
    apart = (
        [] if watched != unwatched else [x for x in sorted(others) if before.get(x) != others[x]]
    )
    equal = watched == unwatched and not apart
    observer = {"steps": spooled.step, "watched": watched, "unwatched": unwatched, "equal": equal}
    record.files.update(observer={**observer, "ranks": apart} if apart else observer)
    if not equal or spooled.step != manifest.step:
        where = f" on rank {', '.join(apart)}" if apart else ""
        raise record.failed(
            f"recorded and unobserved it must end in the same bits, differs{where} after "
            f"{spooled.step} updates: either the script is not deterministic, which a rerun shows "
            "too, or the recorder has changed it"
        )
    return record.files.manifest


@contextmanager
def spool_below(root: Path) -> Iterator[Path]:
    """Give a folder for what a second run of a recorded command leaves; it is gone afterwards."""
    spool = Path(tempfile.mkdtemp(prefix=".spool-", dir=root)).resolve()
    try:
        yield spool
    finally:
        shutil.rmtree(spool, ignore_errors=True)


@contextmanager
def writing(run: ForeignRun, files: RunFiles, check: Callable[[int], None]) -> Iterator[RunWriter]:
    """Give the writer of a run that begins; what an earlier try has left is cut off.

    `check` is called before a drift from the baseline is computed, as that of `Baseline`.
    """
    baseline = None
    if run.baseline is not None:
        steps = snapshot_steps(run.baseline)
        baseline = Baseline(paths=run.baseline, steps=steps, check=check)
    log = MetricLog(files.paths.metrics)
    writer = RunWriter(files, log, baseline=baseline)
    try:
        writer.begin()
        yield writer
    finally:
        log.close()


def _write(
    run: ForeignRun,
    files: RunFiles,
    writer: RunWriter,
    spooled: Spooled,
    git: Mapping[str, str],
    launched: Mapping[str, Any],
) -> Manifest:
    baseline = read_manifest(run.baseline.manifest) if run.baseline else None
    constants = find_constants(spooled, baseline)
    moved = moved_constants(spooled, baseline, constants)
    left_out = {*constants, *moved}
    _tell_what_ran(run, files, spooled)
    resolved = {
        **files.manifest.resolved,
        **_seen(run, spooled),
        "names": [name for name in spooled.names if name not in left_out],
        "constants": constants,
        "launched": dict(launched),
    }
    files.update(resolved=resolved)
    _note(files, doubts=moved.values())
    check_seeds(run, spooled)
    check_dtypes(run, spooled)
    if baseline:
        _hold_against(baseline, run, files)
    _log_updates(writer, spooled, git)
    check_nudge(run, spooled)
    state: Mapping[str, Any] = {}
    for step in sorted(spooled.states):
        state = without(read_state(spooled.states[step]), left_out)
        writer.state(step, state)
    if writer.batches:
        check_same_batches(run, spooled.step)
    final = hash_state(state)
    check_final(run, lambda: final)
    _note(files, rerun_notes(run, final))
    writer.ended(final)
    write_study(run, files.manifest.config)
    return files.manifest


def _tell_what_ran(run: ForeignRun, files: RunFiles, spooled: Spooled) -> None:
    """Put into the manifest what decides the bits: config, environment, start."""
    environment = {
        **files.manifest.environment,
        **spooled.environment,
        **{f"module.{name}": sha256 for name, sha256 in spooled.modules.items()},
    }
    config = _with_steps(run, spooled)
    hashes = {
        **files.manifest.hashes,
        "environment": hash_environment(environment),
        "init_weights": spooled.init,
        "config_less_axis": hash_without(config, run.diff),
    }
    if spooled.held_out.digest:
        hashes["held_out"] = spooled.held_out.digest
    files.update(config=config, environment=environment, hashes=hashes, until=spooled.step)


def _seen(run: ForeignRun, spooled: Spooled) -> dict[str, Any]:
    """Return what goes on record of what was seen of the training, and what was not."""
    return {
        "models": list(spooled.owners),
        "ranks": spooled.world,
        "rank_ends": {str(rank): found for rank, found in sorted(spooled.rank_ends.items())},
        "start": GIVEN if spooled.given else "own",
        "untold": list(spooled.untold),
        "doubts": list(spooled.doubts),
        "start_parts": dict(spooled.start_parts),
        **{x: spooled.attention[x] for x in ("keys", "dtypes") if spooled.attention.get(x)},
        "notes": [
            *spooled.notes,
            *_snapshot_notes(run, spooled),
            *start_notes(run, spooled),
            *_attention_notes(run, spooled),
            *witness_notes(spooled),
        ],
    }


def _note(files: RunFiles, notes: Iterable[str] = (), doubts: Iterable[str] = ()) -> None:
    """Add to the notes of the manifest, and to what makes its pairs unproven."""
    doubts = list(doubts)
    resolved = files.manifest.resolved
    added = [*notes, *(f"unproven: {each}" for each in doubts)]
    files.update(
        resolved={
            **resolved,
            "notes": [*resolved["notes"], *added],
            "doubts": [*resolved["doubts"], *doubts],
        }
    )


def _hold_against(baseline: Manifest, run: ForeignRun, files: RunFiles) -> None:
    """ContractError if what both say of their start is no pair; note what is not proven of it."""
    check_start(baseline, files.manifest)
    pair = baseline, files.manifest, run.diff
    said = [x.says for x in (*launch_lines(*pair), *start_part_lines(*pair)) if x.says]
    _note(files, [f"unproven: {each}" for each in said])


def _log_updates(writer: RunWriter, spooled: Spooled, git: Mapping[str, str]) -> None:
    for update in spooled.updates:
        parts = {
            BATCH_INPUTS: update.inputs,
            BATCH_LABELS: update.labels,
            BATCH_ORDER: update.order if update.batch else "",
        }
        writer.updated(update.step, update.loss, update.batch, parts)
    for step, loss in sorted(spooled.held_out.losses.items()):
        writer.held_out(step, loss)
    write_probed(writer.log, spooled.looks, spooled.step)
    witness = recorded_witness(spooled, git)
    if witness is not None:
        writer.witnessed(witness)


def _snapshot_notes(run: ForeignRun, spooled: Spooled) -> list[str]:
    """Return which snapshots that were asked for lie beyond the end, where it was not planned."""
    late = [step for step in run.asked.snapshot_steps if step > spooled.step]
    if not late:
        return []
    steps = ", ".join(map(str, late))
    return [f"no snapshot after {steps} updates, as asked for: training ended after {spooled.step}"]


def _attention_notes(run: ForeignRun, spooled: Spooled) -> list[str]:
    if not run.asked.attention:
        return []
    calls = spooled.attention
    count, traced, idle = (calls[x] for x in ("replaced", "compiled", "without_gradient"))
    inside = f", and {traced} in compiled graphs, at each of their runs" if traced else ""
    # of an evaluation, a teacher or a frozen model: which of them is not known
    beside = f", and {idle} without a backward pass, such as an evaluation's" if idle else ""
    return [f"{count} attention calls were replaced by {run.asked.attention}{inside}{beside}"]


def _first_manifest(run: ForeignRun, environment: dict[str, Any]) -> Manifest:
    return Manifest(
        study=run.study,
        arm=run.arm,
        seed=run.seed,
        axis=run.axis,
        config=dict(run.config),  # pyright: ignore[reportArgumentType] a command's
        diff={path: list(values) for path, values in run.diff.items()},
        environment=environment,
        resolved=_command(run),
        hashes={
            "config_less_axis": hash_without(run.config, run.diff),
            "environment": hash_environment(environment),
            "protocol": protocol_hash(run.folder),
        },
        state="running",
        step=0,
        message="",
        role=run.role,
    )


def _command(run: ForeignRun) -> dict[str, Any]:
    """Return what a fork of the run needs: its words as they were given, which a config lacks."""
    if not run.words:
        return {}
    return {"command": masked_words(run.words), "deterministic": run.asked.deterministic}


def _with_steps(run: ForeignRun, spooled: Spooled) -> dict[str, Any]:
    """Return the config with the steps that the first baseline has made, which are the plan."""
    if run.config["train"]["steps"]:
        return dict(run.config)
    kept = sorted(step for step in spooled.states if step)
    return {**run.config, "train": {"steps": spooled.step, "snapshot_steps": kept}}


def variables_of(run: ForeignRun) -> dict[str, str]:
    """Return what is set for a run: its variables, and its interpreter's folder first on PATH."""
    python = run.config.get("python", "")
    path = os.environ.get("PATH", "")
    first = {"PATH": f"{Path(python).parent}{os.pathsep}{path}"} if python else {}
    return {**first, **run.env}


def died(launched: Launched, spool: Path) -> str:
    """Return how a command that did not end well has ended: its rank in `spool`, its error.

    Where the recorder has ended it, that is why it did.
    """
    if why := refusal(spool):
        return why
    said = [dead_rank(spool, launched.last_lines), " | ".join(launched.last_words)]
    how = "; ".join(each for each in said if each) or "it printed nothing"
    return f"the command ended with exit code {launched.code}: {how}"


def measure_study(run: ForeignRun) -> list[str]:
    """Measure the distances between the arms of the run's seed; return what could not be.

    The judged step is frozen if its look is due. ValueError for records that can't be read.
    """
    notes = measure_seed(run)
    freeze_window(run.folder)
    return notes


def measure_seed(run: ForeignRun) -> list[str]:
    """Measure what is missing of the distances of the run's seed, and return likewise."""
    found = {paths.arm: paths for paths in list_runs(run.folder) if paths.seed == run.seed}
    notes: list[str] = []
    update_distances(run.folder, run.seed, found, lambda arm, text: notes.append(f"{arm}: {text}"))
    return notes
