"""Where a study keeps its files: `runs/<study>/<arm>/seed-<n>/`.

Leaves out what is in them.
"""

import difflib
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "RunPaths",
    "StudyPaths",
    "check_exists",
    "checkpoint_steps",
    "is_run",
    "list_runs",
    "prediction_steps",
    "run_at",
    "sketch_steps",
    "snapshot_steps",
    "strange_files",
]

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SEED = re.compile(r"seed-(\d+)")
_SNAPSHOT = re.compile(r"step-(\d{8,})\.(?:safetensors|dcp)")
_TEMPORARY = re.compile(r"\..+\.tmp")
"""What `atomic_files` calls a file until it is whole."""
_CHECKPOINT = re.compile(r"step-(\d{8,})\.(?:ckpt|dcp)")


@dataclass(frozen=True, slots=True)
class StudyPaths:
    """The files of a study itself."""

    root: Path

    @property
    def study(self) -> Path:
        """The study as it was expanded: config and arms."""
        return self.root / "study.json"

    @property
    def protocol(self) -> Path:
        """What was fixed before the first run, sealed."""
        return self.root / "protocol.json"

    @property
    def ladder(self) -> Path:
        """The ladder as data."""
        return self.root / "ladder.json"

    def distances(self, seed: int) -> Path:
        """The distances between the arms of a seed."""
        return self.root / "distances" / f"seed-{seed}.json"

    def drifts(self, seed: int) -> Path:
        """The drifts of a seed's arms that were computed anew."""
        return self.root / "drifts" / f"seed-{seed}.json"

    def assay(self, arm: str) -> Path:
        """What faults that were planted on an arm have shown."""
        return self.root / "assay" / f"{arm}.json"

    @property
    def window(self) -> Path:
        """The step at which candidates are judged, as it was frozen at the first look."""
        return self.root / "window.json"

    @property
    def jobs(self) -> Path:
        """The folder of what an executor keeps of its jobs: their ids, and what they print."""
        return self.root / "jobs"

    @property
    def report(self) -> Path:
        """The report for people."""
        return self.root / "report.html"

    @property
    def wandb_dir(self) -> Path:
        """The folder that W&B writes the study's own run into."""
        return self.root / "wandb"


@dataclass(frozen=True, slots=True)
class RunPaths:
    """The files of one arm with one seed."""

    root: Path

    @classmethod
    def for_run(cls, study: Path, arm: str, seed: int) -> "RunPaths":
        """Return the paths of a run below the study's folder.

        ValueError if the arm's name could lead out of it, or if the seed is negative.
        """
        if not _NAME.fullmatch(arm) or set(arm) == {"."}:
            raise ValueError(
                "RunPaths.for_run: arm must be 1 to 64 letters, digits, dots, '_' or '-', "
                f"got {arm!r}; rename the arm"
            )
        if seed < 0:
            raise ValueError(f"RunPaths.for_run: seed must be >= 0, got {seed}; count from 0")
        return cls(study / arm / f"seed-{seed}")

    @property
    def arm(self) -> str:
        """The arm's name."""
        return self.root.parent.name

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.root.name.removeprefix("seed-"))

    @property
    def manifest(self) -> Path:
        """What the run is and how it went."""
        return self.root / "manifest.json"

    @property
    def metrics(self) -> Path:
        """A line per logged step."""
        return self.root / "metrics.jsonl"

    @property
    def witness(self) -> Path:
        """What the run really executed."""
        return self.root / "witness.json"

    @property
    def output(self) -> Path:
        """What a command that is the run's training has printed."""
        return self.root / "output.txt"

    @property
    def lock(self) -> Path:
        """What the process that trains the run holds locked."""
        return self.root / ".lock"

    def leases(self) -> list[Path]:
        """The files of those who hold the run, or have held it, for all who can't lock it."""
        return sorted(self.root.glob(".lease-*"))

    @property
    def snapshots_dir(self) -> Path:
        """The folder of the weights."""
        return self.root / "snapshots"

    @property
    def checkpoints_dir(self) -> Path:
        """The folder of what a resume needs."""
        return self.root / "checkpoints"

    def checkpoint(self, step: int) -> Path:
        """All that a resume at `step` needs."""
        return self.checkpoints_dir / f"step-{step:08d}.ckpt"

    def sharded_checkpoint(self, step: int) -> Path:
        """The folder of all that a resume at `step` needs, which several ranks write."""
        return self.checkpoint(step).with_suffix(".dcp")

    def held_checkpoint(self, step: int) -> Path:
        """Return the one of the two that is there; the file if neither is."""
        sharded = self.sharded_checkpoint(step)
        return sharded if sharded.is_dir() else self.checkpoint(step)

    @property
    def wandb_dir(self) -> Path:
        """The folder that W&B writes into."""
        return self.root / "wandb"

    def snapshot(self, step: int) -> Path:
        """The weights after `step` updates. ValueError if that is negative."""
        if step < 0:
            raise ValueError(f"RunPaths.snapshot: step must be >= 0, got {step}; count from 0")
        return self.snapshots_dir / f"step-{step:08d}.safetensors"

    def sharded_snapshot(self, step: int) -> Path:
        """The folder of the weights after `step` updates that several ranks write. As above."""
        return self.snapshot(step).with_suffix(".dcp")

    def held_snapshot(self, step: int) -> Path:
        """Return the one of the two that is there; the file if neither is."""
        sharded = self.sharded_snapshot(step)
        return sharded if sharded.is_dir() else self.snapshot(step)

    @property
    def predictions_dir(self) -> Path:
        """The folder of what the run predicts on held-out text."""
        return self.root / "predictions"

    def predictions(self, step: int) -> Path:
        """The log-probabilities of held-out tokens after `step` updates. ValueError as above."""
        return self.predictions_dir / self.snapshot(step).name

    @property
    def sketches_dir(self) -> Path:
        """The folder of the hashes and sketches of the weights."""
        return self.root / "sketches"

    def sketch(self, step: int) -> Path:
        """The hash and the sketch of the weights after `step` updates. ValueError as above."""
        return self.sketches_dir / self.snapshot(step).name

    def name_of(self, path: Path) -> str:
        """Return the name of a file of the run: its path in the run's folder, with slashes."""
        # Lightning gives real paths, whatever was asked for
        root = self.root if path.is_relative_to(self.root) else self.root.resolve()
        return path.relative_to(root).as_posix()


def is_run(folder: Path) -> bool:
    """Return whether a path is the folder of a run, which has a manifest."""
    return RunPaths(folder).manifest.is_file()


def strange_files(run: RunPaths) -> list[str]:
    """Return the names in a run's folder that no part of a run has, in order."""
    own = {
        path.name
        for path in (
            run.manifest,
            run.metrics,
            run.witness,
            run.lock,
            run.snapshots_dir,
            run.predictions_dir,
            run.sketches_dir,
            run.checkpoints_dir,
            run.wandb_dir,
            run.output,
            *run.leases(),
        )
    }
    found = sorted(path.name for path in run.root.glob("*"))
    return [name for name in found if name not in own and not _TEMPORARY.fullmatch(name)]


def check_exists(path: Path) -> None:
    """Raise ValueError, which names the nearest files beside it, if there is nothing at `path`."""
    if path.exists():
        return
    near = f"no folder {path.parent}"
    if path.parent.is_dir():
        names = sorted(entry.name for entry in path.parent.iterdir())
        found = difflib.get_close_matches(path.name, names, n=3, cutoff=0.4) or names[:3]
        near = ", ".join(found) or "an empty folder"
    raise ValueError(f"{path}: must exist; nearest: {near}")


def run_at(folder: Path, what: str) -> RunPaths:
    """Return the paths of the run in `folder`, under its real name.

    ValueError, beginning with `what`, e.g. "fork: run", if it holds no run.
    """
    if not is_run(folder):
        raise ValueError(
            f"{what} must be a run's folder, got {str(folder)!r}; it is runs/<study>/<arm>/seed-<n>"
        )
    return RunPaths(folder.resolve())


def list_runs(study: Path) -> list[RunPaths]:
    """Return the runs found below a study's folder, by arm and seed."""
    found = [
        RunPaths(path)
        for path in study.glob("*/seed-*")
        if path.is_dir() and _SEED.fullmatch(path.name)
    ]
    return sorted(found, key=lambda run: (run.arm, run.seed))


def snapshot_steps(run: RunPaths) -> list[int]:
    """Return the steps that a run has whole snapshots of, in order."""
    return _steps(run.snapshots_dir, _SNAPSHOT)


def prediction_steps(run: RunPaths) -> list[int]:
    """Return the steps that a run has whole predictions of, in order."""
    return _steps(run.predictions_dir, _SNAPSHOT)


def sketch_steps(run: RunPaths) -> list[int]:
    """Return the steps that a run has whole sketches of, in order."""
    return _steps(run.sketches_dir, _SNAPSHOT)


def checkpoint_steps(run: RunPaths) -> list[int]:
    """Return the steps that a run has whole checkpoints of, in order."""
    return _steps(run.checkpoints_dir, _CHECKPOINT)


def _steps(folder: Path, name: re.Pattern[str]) -> list[int]:
    matches = (name.fullmatch(path.name) for path in folder.glob("*"))
    return sorted({int(match.group(1)) for match in matches if match})
