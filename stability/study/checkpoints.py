"""Checkpoints: how they are written, from which one a run resumes, and how a fork inherits one.

Lightning decides when to save and what. This module writes the file atomically and lists it in the
manifest with its checksum, so a checkpoint is whole or does not count. A checkpoint goes with the
log up to its step, which is on disk before it; one whose log has lost that part is passed over for
an older one, and so is one that lacks what a checkpoint holds. A run is decided by its config
alone, so one without a checkpoint that serves starts anew and still ends in the same bits. Whether
a run may be forked is left to `fork`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
from lightning.fabric.plugins import CheckpointIO
from torch import distributed

from stability.records.atomic_files import remove_any, write_whole
from stability.records.dcp_files import DcpWrite
from stability.records.manifest import Manifest
from stability.records.metric_log import difference_from, read_start
from stability.records.metric_names import DRIFTS
from stability.records.paths import (
    RunPaths,
    checkpoint_steps,
    prediction_steps,
    sketch_steps,
    snapshot_steps,
)
from stability.records.plain_files import check_plain
from stability.records.record_types import Count, check_type
from stability.records.run_files import (
    RunFiles,
    content_checksum,
    damaged_files,
    read_run_file,
)
from stability.records.weight_files import load_torch_file
from stability.study.sharded_checkpoints import (
    copy_checkpoint,
    read_rest,
    read_whole,
    write_checkpoint,
)

__all__ = ["DOOR", "CheckpointFiles", "clear_unlisted", "lay_fork", "resume_from"]

DOOR = "TrainerDoor"
"""Lightning's key for the state of `recorder.trainer_door.TrainerDoor`, by which a checkpoint of
our own runs is known."""


class CheckpointFiles(CheckpointIO):
    """Lightning's way to write and read checkpoints: whole files, listed in the run's manifest.

    The last `keep` checkpoints are kept, or all of them if `keep` is 0.
    """

    def __init__(self, files: RunFiles, keep: int) -> None:
        self._files = files
        self._keep = keep
        self._write: DcpWrite | None = None
        self._lists = False

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
    ) -> None:
        """Write `checkpoint` to `path`, list it, and delete all but the last `keep` checkpoints."""
        path = Path(path)
        _write_checkpoint(path, checkpoint)
        self._files.add(path)
        self._drop_old()

    def save_parts(self, checkpoint: Mapping[str, Any], path: Path, group: Any) -> None:
        """Write a checkpoint of which each rank of `group` has a part, as a folder.

        Training goes on while it is written: `settle` lists it once it is whole. One that is
        still being written is waited for first.
        """
        self.settle(wait=True)
        folder = path.with_suffix(".dcp")
        is_first = distributed.get_rank(group) == 0
        self._write = write_checkpoint(folder, checkpoint, group, is_first=is_first)
        self._lists = is_first

    def settle(self, *, wait: bool = False) -> None:
        """List the checkpoint that was begun last, on the first rank, if it is whole by now.

        With `wait` once it is; OSError if it could not be written, which is so told to all ranks at
        one place, and not to one in the middle of an update that others wait for.
        """
        if self._write is None or not (wait or self._write.is_whole):
            return
        write, self._write = self._write, None
        folder = write.wait()
        if self._lists:
            self._files.add(folder)
            self._drop_old()

    def _drop_old(self) -> None:
        paths = self._files.paths
        for step in checkpoint_steps(paths)[: -self._keep] if self._keep else ():
            self._files.remove(paths.held_checkpoint(step))

    def load_checkpoint(
        self, path: str | Path, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return what was written: tensors and plain values, never a pickled object.

        Of a folder all parts are in it.
        """
        if Path(path).is_dir():
            return read_whole(Path(path))
        found = check_plain(Path(path))
        return torch.load(found, map_location=map_location or "cpu", weights_only=True)

    def remove_checkpoint(self, path: str | Path) -> None:
        """Do nothing: `save_checkpoint` deletes old checkpoints, and takes them off the list."""


def resume_from(
    paths: RunPaths, manifest: Manifest, note: Callable[[str], None]
) -> tuple[int, dict[str, str]]:
    """Return the step of the checkpoint to resume from, and the undamaged files up to that step.

    The files are checksums by name, as in the manifest. Step 0 and no files mean that the run
    starts anew. `note` is called with a sentence for each damaged record and one for what is done
    about it.
    """
    wrong = damaged_files(paths, manifest)
    said = [f"{name} {what}" for name, what in wrong.items()]
    whole = manifest.files.keys() - wrong.keys()
    steps = [s for s in checkpoint_steps(paths) if paths.name_of(paths.held_checkpoint(s)) in whole]
    lost = [
        _step_of(name)
        for name in wrong
        if _is_of_a_step(name) and not name.startswith(f"{paths.checkpoints_dir.name}/")
    ]
    # damaged weights or predictions are written again only if the run passes their step again
    usable = [step for step in steps if step < min(lost, default=step + 1)]
    while usable and (wrong_with := _fault(paths, usable[-1])):
        said.append(wrong_with)
        usable.pop()
    at = max(usable, default=0)
    for sentence in said:
        note(sentence)
    if said:
        note(f"going on from step {at}" if at else "starting anew")
    kept = {
        name: sum
        for name, sum in manifest.files.items()
        if name not in wrong and _is_of_a_step(name) and _step_of(name) <= at
    }
    return at, kept if at else {}


def clear_unlisted(paths: RunPaths, files: dict[str, str]) -> None:
    """Delete the files of single steps that `files` does not list, and `.tmp` files.

    They are damaged, or later than the step that the run resumes from, or were never listed, or a
    kill left them half written. The run writes them again, with the same bits.
    """
    found = [paths.held_snapshot(step) for step in snapshot_steps(paths)]
    found += [paths.predictions(step) for step in prediction_steps(paths)]
    found += [paths.sketch(step) for step in sketch_steps(paths)]
    found += [paths.held_checkpoint(step) for step in checkpoint_steps(paths)]
    found += paths.root.rglob(".*.tmp")
    for path in found:
        if paths.name_of(path) not in files:
            remove_any(path)


def _is_of_a_step(name: str) -> bool:
    """Whether a listed file belongs to one step: an ended run's log is listed as well."""
    return Path(name).stem.startswith("step-")


def _step_of(name: str) -> int:
    """Return the step in the name of a snapshot, predictions, a sketch or a checkpoint."""
    return int(Path(name).stem.removeprefix("step-"))


def lay_fork(
    parent: RunPaths, fork: RunPaths, at: int, resettle: Callable[[dict[str, Any]], None]
) -> dict[str, str]:
    """Copy the parent's metric log and checkpoint of step `at` into the fork's folder.

    Returns the fork's files for its manifest: the checkpoint's checksum by its name. Log lines with
    drifts are left out, since those are distances from the parent's baseline. `resettle` puts the
    fork's own settings into the checkpoint, in place. ValueError if the parent's checkpoint is
    damaged or missing, or the log up to it.
    """
    source = read_run_file(parent, parent.held_checkpoint(at))
    checkpoint = _read_checkpoint(parent, at)
    lacking = _log_lacks(parent, checkpoint)
    if lacking:
        raise ValueError(f"{parent.root}: {lacking}; fork from an earlier step, or run it again")
    recorded = checkpoint["callbacks"][DOOR]
    kept = [
        line
        for line in read_start(parent.metrics, recorded["position"]).splitlines(keepends=True)
        if not _holds_drifts(line)
    ]
    log = b"".join(kept)
    write_whole(fork.metrics, lambda temporary: temporary.write_bytes(log))
    # on the resume the writer cuts the log at this byte, and the fork's log is the shorter one
    recorded |= {"position": len(log), "sha256": hashlib.sha256(log).hexdigest()}
    # the parent's updates were made under the parent's label, and its own witness tells of them
    recorded["stretches"] = []
    resettle(checkpoint)
    if source.is_dir():
        path = fork.sharded_checkpoint(at)
        copy_checkpoint(source, path, checkpoint)
    else:
        path = fork.checkpoint(at)
        _write_checkpoint(path, checkpoint)
    return {fork.name_of(path): content_checksum(path)}


def _write_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    def save(temporary: Path) -> None:
        # a file that Python has opened: torch's own would not say why a write failed
        with temporary.open("wb") as file:
            torch.save(checkpoint, file)

    write_whole(path, save)


class _Recorded(TypedDict):
    """The state of the recorder's door."""

    position: Count
    sha256: str
    step: Count
    batches: str
    bad: Count
    since: Count
    stretches: list[Any]


class _Callbacks(TypedDict):
    TrainerDoor: _Recorded


class _Optimizer(TypedDict):
    param_groups: list[dict[str, Any]]


class _Checkpoint(TypedDict):
    """What this file reads in a checkpoint; the rest is Lightning's, and the callbacks' own."""

    callbacks: _Callbacks
    global_step: NotRequired[Count]
    optimizer_states: list[_Optimizer]


def _read_checkpoint(paths: RunPaths, step: int) -> dict[str, Any]:
    """Return a checkpoint, of a folder less its parts.

    ValueError, which names the file, if it does not say what one says.

    A right seal does not tell: who has the file can seal anything.
    """
    path = paths.held_checkpoint(step)
    content = read_rest(path) if path.is_dir() else load_torch_file(path)
    try:
        check_type(content, _Checkpoint, "its content")
    except ValueError as error:
        raise ValueError(f"{path}: must be a checkpoint: {error}") from error
    found = content.get("global_step", step)
    if found != step:
        raise ValueError(f"{path}: must be the checkpoint of step {step}, is that of step {found}")
    return content


def _fault(paths: RunPaths, step: int) -> str:
    """Return why a run can't go on from the checkpoint of a step; mostly nothing."""
    try:
        checkpoint = _read_checkpoint(paths, step)
    except ValueError as error:
        return str(error)
    lacking = _log_lacks(paths, checkpoint)
    return lacking and f"{lacking}, which the checkpoint of step {step} goes with"


def _log_lacks(paths: RunPaths, checkpoint: Mapping[str, Any]) -> str:
    """Return what is wrong with the part of the log that a checkpoint goes with; mostly nothing."""
    said = checkpoint["callbacks"][DOOR]
    wrong = difference_from(paths.metrics, said["position"], said["sha256"])
    return wrong and f"{paths.metrics.name} {wrong}"


def _holds_drifts(line: bytes) -> bool:
    # the names alone: a text that a line holds may speak of drifts as well
    return DRIFTS.encode() in line and any(name.startswith(DRIFTS) for name in json.loads(line))
