"""The files of a run with their checksums, which the manifest lists.

A snapshot or checkpoint counts from the moment that the manifest lists it, which is after it was
written whole; a file that a kill left unlisted is written again. The metric log has a checksum in
each line while it grows (`metric_log`); once the run has ended the manifest lists it too.
"""

import hashlib
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.records.atomic_files import remove_any
from stability.records.manifest import Manifest, read_manifest, write_manifest
from stability.records.metric_log import read_lines
from stability.records.paths import RunPaths, snapshot_steps
from stability.records.plain_files import HollowFileError
from stability.records.sealed_json import file_checksum
from stability.records.snapshots import read_snapshot

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "RunFiles",
    "checkpoint_of",
    "content_checksum",
    "damage",
    "damaged_files",
    "file_damage",
    "log_damage",
    "misplacement",
    "missing_file",
    "predictions_of",
    "read_run_file",
    "read_run_snapshot",
    "read_summed_snapshot",
    "recorded_steps",
    "snapshot_of",
    "summed_snapshot",
]


def content_checksum(path: Path) -> str:
    """Return the SHA-256 of a file's bytes; of a folder that over its files' names and checksums.

    OSError for what can't be read, is no plain file, or is a folder in a folder.
    """
    if not path.is_dir():
        return file_checksum(path)
    files = sorted(path.iterdir())
    lines = "".join(f"{file_checksum(file)}  {file.name}\n" for file in files)
    return hashlib.sha256(lines.encode("utf-8", "surrogateescape")).hexdigest()


class RunFiles:
    """The manifest of a run that is being trained, and the files it lists."""

    def __init__(self, paths: RunPaths, manifest: Manifest) -> None:
        self.paths = paths
        self.manifest = manifest

    @classmethod
    def unnamed(cls, folder: Path) -> "RunFiles":
        """Return the files of a run that belongs to no study, in `folder`."""
        manifest = Manifest(
            study="",
            arm="",
            seed=0,
            axis="none",
            config={},
            diff={},
            environment={},
            resolved={},
            hashes={},
            state="running",
            step=0,
            message="",
        )
        return cls(RunPaths(folder), manifest)

    def update(self, **changes: Any) -> None:
        """Change fields of the manifest and write it."""
        changed = replace(self.manifest, **changes)
        write_manifest(self.paths.manifest, changed)
        self.manifest = changed

    def add(self, path: Path) -> None:
        """List `path`, a file or a folder of DCP's, which has just been written whole."""
        name = self.paths.name_of(path)
        self.update(files={**self.manifest.files, name: content_checksum(path)})

    def remove(self, path: Path) -> None:
        """List `path` no more, then delete it."""
        gone = self.paths.name_of(path)
        self.update(files={x: sum for x, sum in self.manifest.files.items() if x != gone})
        remove_any(path)

    def drop(self, paths: Iterable[Path]) -> None:
        """Delete files that were needed, and keep their checksums on record.

        The manifest says so first: after a kill in between, the same call goes on with the rest.
        """
        files, dropped = dict(self.manifest.files), dict(self.manifest.dropped)
        gone = list(paths)
        for path in gone:
            if path in self:
                dropped[self.paths.name_of(path)] = files.pop(self.paths.name_of(path))
        if dropped != self.manifest.dropped:
            self.update(files=files, dropped=dropped)
        for path in gone:
            remove_any(path)

    def checksum(self, path: Path) -> str:
        """Return the SHA-256 of `path` as it was listed."""
        return self.manifest.files[self.paths.name_of(path)]

    def __contains__(self, path: Path) -> bool:
        return self.paths.name_of(path) in self.manifest.files


def damaged_files(paths: RunPaths, manifest: Manifest) -> dict[str, str]:
    """Return what is wrong with files that `manifest` lists, by name; empty if all are whole."""
    found = {name: file_damage(paths, manifest, paths.root / name) for name in manifest.files}
    return {name: wrong for name, wrong in found.items() if wrong}


def missing_file(paths: RunPaths, manifest: Manifest) -> str:
    """Return a sentence on the first file that `manifest` lists and that is not there; mostly none.

    For readers: folders are listed, and no byte is read.
    """
    there: dict[str, set[str]] = {}
    for name in manifest.files:
        folder, _, file = name.rpartition("/")
        if folder not in there:
            there[folder] = _files_in(paths.root / folder)
        if file not in there[folder]:
            return f"{paths.root / name}: is missing"
    return ""


def _files_in(folder: Path) -> set[str]:
    try:
        with os.scandir(folder) as entries:
            return {entry.name for entry in entries if entry.is_file() or entry.is_dir()}
    except FileNotFoundError:
        return set()


def damage(paths: RunPaths) -> list[str]:
    """Return a sentence for each damaged record of the run: manifest, metric log, listed files.

    Records of another run, in this one's place, are damage too.
    """
    try:
        manifest = read_manifest(paths.manifest)
        stranger = misplacement(paths, manifest)
        found = [f"{paths.root}: {stranger}"] if stranger else []
        found += [
            f"{paths.root / name}: {wrong}"
            for name, wrong in damaged_files(paths, manifest).items()
        ]
    except ValueError as error:
        found = [str(error)]
    log = log_damage(paths)
    return [*found, log] if log else found


def misplacement(paths: RunPaths, manifest: Manifest, study: str = "") -> str:
    """Return whose records lie in the folder of a run; empty if they are its own.

    The folder names the arm and the seed, for a fork as for an arm. The study's name is compared
    where both are known; its own folder may be called as one likes.
    """
    is_strange = bool(study and manifest.study) and manifest.study != study
    folder = f"{manifest.arm}/seed-{manifest.seed}"
    if f"{paths.root.parent.name}/{paths.root.name}" == folder and not is_strange:
        return ""
    of_study = f" of study {manifest.study}" if is_strange else ""
    return f"records belong to arm {manifest.arm}, seed {manifest.seed}{of_study}"


def log_damage(paths: RunPaths) -> str:
    """Return what is wrong with the lines of the run's log; empty if nothing is, or no log."""
    if not paths.metrics.exists():
        return ""
    try:
        for _ in read_lines(paths.metrics):
            pass
    except ValueError as error:
        return str(error)
    return ""


def recorded_steps(paths: RunPaths) -> list[int]:
    """Return the steps of which a run has a snapshot, or had one that was dropped, in order."""
    folder = f"{paths.name_of(paths.snapshots_dir)}/"
    dropped = [name for name in read_manifest(paths.manifest).dropped if name.startswith(folder)]
    steps = [int(Path(name).stem.removeprefix("step-")) for name in dropped]
    return sorted({*snapshot_steps(paths), *steps})


def read_run_snapshot(paths: RunPaths, step: int) -> "dict[str, Tensor]":
    """Return the weights of a run after `step` updates, on the CPU; ValueError as below."""
    return read_summed_snapshot(paths, step)[0]


def read_summed_snapshot(paths: RunPaths, step: int) -> "tuple[dict[str, Tensor], str]":
    """Return the weights of a run after `step` updates, on the CPU, and their file's SHA-256.

    ValueError, naming the file, if it is missing, or not the one that the manifest lists.
    """
    path, checksum = summed_snapshot(paths, step)
    return read_snapshot(path), checksum


def summed_snapshot(paths: RunPaths, step: int) -> tuple[Path, str]:
    """Return the run's snapshot of a step, once it is known to be whole, and its SHA-256.

    ValueError, naming the file, if it is missing, or not the one that the manifest lists.
    """
    manifest = read_manifest(paths.manifest)
    path = snapshot_of(paths, manifest, step)
    wrong = file_damage(paths, manifest, path)
    if wrong:
        raise ValueError(f"{path}: {wrong}")
    return path, manifest.files[paths.name_of(path)]


def snapshot_of(paths: RunPaths, manifest: Manifest, step: int) -> Path:
    """Return the file or the folder that a run's manifest lists as its snapshot, kept or dropped.

    The file's name if it lists neither.
    """
    sharded = paths.sharded_snapshot(step)
    is_sharded = paths.name_of(sharded) in manifest.all_files
    return sharded if is_sharded else paths.snapshot(step)


def checkpoint_of(paths: RunPaths, manifest: Manifest, step: int) -> Path:
    """Return the file or the folder that a run's manifest lists as its checkpoint, likewise."""
    sharded = paths.sharded_checkpoint(step)
    is_sharded = paths.name_of(sharded) in manifest.all_files
    return sharded if is_sharded else paths.checkpoint(step)


def predictions_of(paths: RunPaths, manifest: Manifest, step: int) -> Path:
    """Return the file of a run's predictions: the counterpart of `snapshot_of`."""
    return paths.predictions(step)


def read_run_file(paths: RunPaths, path: Path) -> Path:
    """Return `path`, once it is known to be whole.

    ValueError, naming the file, if it is missing, or not the one that the manifest lists.
    """
    wrong = file_damage(paths, read_manifest(paths.manifest), path)
    if wrong:
        raise ValueError(f"{path}: {wrong}")
    return path


def file_damage(paths: RunPaths, manifest: Manifest, path: Path) -> str:
    """Return what is wrong with a file of the run; empty if it is the one that `manifest` lists."""
    if not (path.is_file() or path.is_dir()):
        is_dropped = paths.name_of(path) in manifest.dropped
        return "was dropped, as the study's keep says" if is_dropped else "is missing"
    expected = manifest.files.get(paths.name_of(path))
    if expected is None:
        return "is not in the run's manifest"
    try:
        found = content_checksum(path)
    except HollowFileError as error:
        return f"is damaged: it {error.strerror}"
    except OSError as error:
        # a folder from elsewhere may hold anything, as a pipe or more folders
        if not path.is_dir():
            raise
        return f"is damaged: {Path(str(error.filename)).name}: {error.strerror}"
    if found != expected:
        return f"is damaged: its SHA-256 is {found[:16]}..., the manifest's {expected[:16]}..."
    return ""
