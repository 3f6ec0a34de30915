"""Runs without a training: what an executor needs to know of them, and how they ended."""

from dataclasses import dataclass, replace
from pathlib import Path

from stability.records.manifest import write_manifest
from stability.records.paths import RunPaths
from stability.records.run_files import RunFiles


@dataclass(frozen=True)
class NamedArm:
    name: str


@dataclass(frozen=True)
class PlainRun:
    arm: NamedArm
    seed: int
    paths: RunPaths
    baseline: RunPaths | None
    last_step: int = 6


def plain_runs(folder: Path, arms: tuple[str, ...], seeds: tuple[int, ...]) -> list[PlainRun]:
    """Return the runs of a study, seed by seed; the first arm is the baseline."""
    return [
        PlainRun(
            arm=NamedArm(arm),
            seed=seed,
            paths=RunPaths.for_run(folder, arm, seed),
            baseline=None if arm == arms[0] else RunPaths.for_run(folder, arms[0], seed),
        )
        for seed in seeds
        for arm in arms
    ]


def end(run: PlainRun, state: str = "finished", message: str = "") -> None:
    """Write the manifest of a run that has come to this."""
    blank = RunFiles.unnamed(run.paths.root).manifest
    write_manifest(run.paths.manifest, replace(blank, state=state, step=6, message=message))
