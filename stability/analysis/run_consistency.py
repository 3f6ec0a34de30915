"""Whether the parts of one run's record say the same: its manifest, its log, its snapshots.

A manifest holds hashes and words of what other files hold too, so a part that was changed, even
under right checksums, contradicts another one. Nothing here proves that a training took place: of a
record that was made up as a whole, losses and all, no part contradicts another. Leaves out damaged
files (`records.run_files`) and what two runs say of one another (`pair_contract`).
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from stability.analysis.drift_parents import is_kept
from stability.analysis.pair_proof import ProofLine, compared
from stability.config.command_study import with_flags
from stability.config.commands import command_training, is_adopted, is_command
from stability.config.diff import hash_without
from stability.config.masking import masked_values, masked_words
from stability.records.identity import hash_environment
from stability.records.manifest import ENDED, PATIENCE, Manifest
from stability.records.metric_log import read_log
from stability.records.metric_names import BATCH_HASH, TRAIN_LOSS
from stability.records.paths import RunPaths
from stability.records.record_hash import record_hash
from stability.records.run_files import read_run_snapshot
from stability.records.snapshots import hash_state

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["OWN_RECORD", "consistency_line", "doubt_lines"]

OWN_RECORD = "own record of"
"""How the field of a line begins that holds a record against itself."""


def consistency_line(paths: RunPaths, manifest: Manifest) -> ProofLine:
    """Say whether the parts of a run's record, whose files are whole, say the same."""
    try:
        said = next((said for part in _PARTS for said in part(paths, manifest)), "")
    except (ValueError, OSError) as error:
        said = str(error)
    return ProofLine(
        field=f"{OWN_RECORD} {manifest.arm}, seed {manifest.seed}",
        first="contradicts itself" if said else "agrees with itself",
        second="",
        sameness="different" if said else "same",
        says=f"the record of {manifest.arm}, seed {manifest.seed}, contradicts itself: {said}"
        if said
        else "",
    )


def doubt_lines(*manifests: Manifest) -> Iterator[ProofLine]:
    """Tell what the recorders of runs did not see of their trainings: it is proven of none."""
    doubts = sorted({each for x in manifests for each in x.resolved.get("doubts", ())})
    for each in doubts:
        yield replace(compared("what was recorded", None, None), says=each)


def _hashes(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold the hashes of config and environment against those, as the manifest has them."""
    made = {
        "config_less_axis": hash_without(manifest.config, manifest.diff),
        "environment": hash_environment(manifest.environment),
    }
    for name, found in made.items():
        said = manifest.hashes.get(name, found)
        if said != found:
            yield f"hashes.{name} is {_short(said)}, what it is of has {_short(found)}"


def _measured(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold the hash of losses and snapshots against the files; older records have none."""
    said = manifest.hashes.get("record")
    if not said or manifest.state not in ENDED:
        return
    found = record_hash(paths, manifest)
    if said != found:
        yield (
            f"hashes.record is {_short(said)}, that of its losses, snapshots and notes "
            f"{_short(found)}: they are not those it ended with"
        )
    if paths.metrics.exists() and paths.name_of(paths.metrics) not in manifest.files:
        yield f"it does not list {paths.name_of(paths.metrics)}, which lists every file of a run"


def _claims(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold what a manifest says of its weights against what else it says of them."""
    watched, final = manifest.observer.get("watched"), manifest.hashes.get("final_weights")
    if manifest.observer.get("equal") and is_command(manifest.config) and watched != final:
        yield f"observer.watched is {watched}, hashes.final_weights {final}"
    names = manifest.resolved.get("names")
    if names and is_kept(paths, manifest, manifest.step):
        own = list(read_run_snapshot(paths, manifest.step))
        if sorted(names) != sorted(own):
            yield f"resolved.names are {_some(names)}, the last snapshot has {_some(own)}"


def _some(names: Sequence[str]) -> str:
    return f"{len(names)}, {', '.join(sorted(names)[:3])}"


def _command(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold the words of a command against the program and the flags of its config."""
    words = manifest.resolved.get("command", [])
    if not words or not is_command(manifest.config):
        return
    config: Mapping[str, Any] = manifest.config
    if "setup" in config:  # a study's file has them as they are written there
        yield from _written_command(words, config)
        return
    told = command_training(words, config.get("env", {}))
    for name in ("program", "flags"):
        # an older version has masked nothing
        if masked_values(told[name]) != masked_values(config.get(name)):
            yield f"config.{name} is {config.get(name)}, the command that was run has {told[name]}"


def _written_command(words: Sequence[str], config: Mapping[str, Any]) -> Iterator[str]:
    try:
        written = masked_words(with_flags(config["program"], config["flags"]))
    except ValueError as error:
        yield f"config.{error}"
        return
    # where a checkpoint lies is another place on each machine; its checksum is compared
    forms = [re.escape(word).replace(re.escape("{resume}"), ".*") for word in written]
    if len(words) != len(forms) or not all(map(re.fullmatch, forms, words)):
        told, ran = " ".join(written), " ".join(words)
        yield f"config.program with its flags is {told}, the command that was run is {ran}"


def _updates(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold the log's batches and losses against how many updates there were and how they ended."""
    if manifest.state not in ENDED or not paths.metrics.exists():
        return
    log = read_log(paths.metrics, keep=[BATCH_HASH])
    batches = {line["step"]: line[BATCH_HASH] for _, line in log.kept}
    told, first = manifest.hashes.get("batches"), manifest.fork.get("at", 0) + 1
    if told:
        lacking = sorted(set(range(first, manifest.step + 1)) - batches.keys())
        if lacking:
            yield f"{paths.metrics}: has no batch of update {lacking[0]}, of {manifest.step}"
        elif batches[manifest.step] != told:
            yield (
                f"hashes.batches is {_short(told)}, the log's last is "
                f"{_short(batches[manifest.step])}"
            )
    beyond = [step for step in batches if step > manifest.step]
    if beyond:
        yield f"{paths.metrics}: has a batch of update {beyond[0]}, of {manifest.step}"
    series = log.metrics.get(TRAIN_LOSS)
    losses = dict(zip(series.steps, series.values, strict=True)) if series else {}
    yield from _losses(paths, manifest, losses)


def _losses(paths: RunPaths, manifest: Manifest, losses: Mapping[int, float]) -> Iterator[str]:
    """Say where losses are missing, and whether they ended as the manifest says."""
    train: Mapping[str, Any] = manifest.config.get("train", {})
    every = train.get("log_every", 1)
    begin = manifest.fork.get("at", 0)
    due = [step for step in range(begin, manifest.step) if step % every == 0]
    # of somebody's script the loss of an update may not have been seen
    lacking = [] if is_command(manifest.config) else [step for step in due if step not in losses]
    if lacking:
        yield f"{paths.metrics}: has no {TRAIN_LOSS} at step {lacking[0]}, of {manifest.step}"
    if every > 1:
        return
    last = [losses.get(step) for step in range(manifest.step - PATIENCE, manifest.step)]
    ends_bad = all(loss is not None and not math.isfinite(loss) for loss in last)
    if manifest.state == "diverged" and not ends_bad:
        yield f"says that it diverged, and the last {PATIENCE} losses of the log are not all bad"
    if manifest.state == "finished" and ends_bad:
        yield f"says that it finished, and the last {PATIENCE} losses of the log are not finite"


def _weights(paths: RunPaths, manifest: Manifest) -> Iterator[str]:
    """Hold the hashes of the first and the last weights against the snapshots."""
    final = manifest.hashes.get("final_weights")
    last = manifest.step
    if final and is_kept(paths, manifest, last):
        found = hash_state(read_run_snapshot(paths, last))
        if found != final:
            yield (
                f"hashes.final_weights is {_short(final)}, the snapshot of step {last} has "
                f"{_short(found)}"
            )
    first = manifest.hashes.get("init_weights")
    if first and not _is_moved(manifest) and is_kept(paths, manifest, 0):
        state = read_run_snapshot(paths, 0)
        found = hash_state(_as_drawn(state))
        if found != first and _is_comparable(state):
            yield (
                f"hashes.init_weights is {_short(first)}, the snapshot of step 0 has "
                f"{_short(found)}"
            )


def _is_moved(manifest: Manifest) -> bool:
    """Whether the hash of the start is not of what the snapshot of step 0 holds.

    It is taken before a nudge, and of a command it has the weights that do not train as well.
    """
    nudge: Any = manifest.config.get("nudge", {})
    has_others = is_command(manifest.config) and not is_adopted(manifest.config)
    return bool(nudge.get("ulps")) or bool(manifest.fork) or has_others


def _as_drawn(state: "Mapping[str, Tensor]") -> "dict[str, Tensor]":
    """Return FP64 weights in the FP32 that they were drawn in."""
    import torch  # heavy

    return {n: x.float() if x.dtype == torch.float64 else x for n, x in state.items()}


def _is_comparable(state: "Mapping[str, Tensor]") -> bool:
    """Whether no weight was rounded after the hash was taken, as modules in a low precision are."""
    kinds = {str(x.dtype) for x in state.values() if x.is_floating_point()}
    return kinds in ({"torch.float32"}, {"torch.float64"})


def _short(digest: str) -> str:
    return f"{digest[:16]}..."


_PARTS: tuple[Callable[[RunPaths, Manifest], Iterator[str]], ...] = (
    _hashes,
    _command,
    _claims,
    _updates,
    _weights,
    _measured,
)
