"""A study as its records tell it, read once: what was planned, and what each run left behind.

Reads a study at any moment: arms that have not started, runs that failed or are being written are
part of the answer. Leaves out every judgement (`ladder`, `verdict`, `proofs`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from stability.config.convert import Place, from_mapping
from stability.config.policy import PolicyConfig
from stability.config.schema import BASELINE, Axis
from stability.records.events import Event, read_events
from stability.records.layout import RunPaths, StudyPaths
from stability.records.manifest import ENDED, Manifest, read_manifest
from stability.records.metric_log import Series, read_counts, read_metrics
from stability.records.names import TRAIN_LOSS, drift_name
from stability.records.sealed_json import file_checksum, read_sealed

__all__ = ["RecordedArm", "RecordedRun", "RecordedStudy", "RunState", "read_study"]

RunState = Literal["running", "interrupted", "failed", "diverged", "finished", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedRun:
    """One arm with one seed; `manifest` is None and `error` says why where it can't be read."""

    paths: RunPaths
    seed: int
    manifest: Manifest | None
    metrics: Mapping[str, Series]
    counts: Mapping[str, Mapping[int, list[int]]]
    """Histograms by name and step."""
    events: tuple[Event, ...] = ()
    error: str

    @property
    def state(self) -> RunState:
        """The manifest's state; `missing` if never started, `failed` if unreadable."""
        if self.error:
            return "failed"
        return self.manifest.state if self.manifest else "missing"

    @property
    def message(self) -> str:
        """What the run or the reader had to say; mostly empty."""
        return self.error or (self.manifest.message if self.manifest else "")

    def series(self, name: str) -> dict[int, float]:
        """Return the values of a metric by step; empty if it was never logged."""
        found = self.metrics.get(name)
        return dict(zip(found.steps, found.values, strict=True)) if found else {}

    def drift(self, metric: str, parameter: str = "all") -> dict[int, float]:
        """Return a drift metric by step."""
        return self.series(drift_name(parameter, metric))

    def loss(self) -> dict[int, float]:
        """Return the training loss by step."""
        return self.series(TRAIN_LOSS)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedArm:
    """One arm: what it changes, and its runs by seed."""

    name: str
    axis: Axis
    diff: Mapping[str, list[Any]]
    """Dotted config path -> [baseline's value, this arm's value]."""
    runs: Mapping[int, RecordedRun]


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordedStudy:
    """What a study planned and what is on disk; the baseline comes first."""

    name: str
    question: str
    yardstick: str
    base: Mapping[str, Any]
    """The baseline's config, as plain JSON values."""
    seeds: tuple[int, ...]
    steps: int
    early_step: int
    """The early step the config asks for; 0 means the first snapshot."""
    policy: PolicyConfig
    arms: tuple[RecordedArm, ...]

    def arm(self, name: str) -> RecordedArm | None:
        """Return the arm of that name, if the study has it."""
        return next((arm for arm in self.arms if arm.name == name), None)

    @property
    def candidates(self) -> tuple[RecordedArm, ...]:
        """Every arm but the baseline."""
        return tuple(arm for arm in self.arms if arm.name != BASELINE)

    @property
    def planned_snapshots(self) -> list[int]:
        """The steps at which the study compares weights, sorted, from 0 to the last."""
        asked = self.base["train"].get("snapshot_steps", ())
        return sorted({0, self.steps, *(step for step in asked if 0 <= step <= self.steps)})

    @property
    def drift_steps(self) -> list[int]:
        """The steps at which some arm's drift is on record, sorted."""
        runs = (run for arm in self.candidates for run in arm.runs.values())
        return sorted({step for run in runs for step in run.drift("rel_l2")})


def read_study(study_dir: Path) -> RecordedStudy:
    """Read the records of the study in `study_dir`.

    ValueError if `study.json` is missing or is no study; nothing else on disk can make it fail.
    """
    path = StudyPaths(study_dir).study
    try:
        content = read_sealed(path, writer="`stability run`")
        config, arms = content["config"], content["arms"]
        return RecordedStudy(
            name=config["name"],
            question=config["question"],
            yardstick=config.get("yardstick", ""),
            base=config["base"],
            seeds=tuple(config["seeds"]),
            steps=config["base"]["train"]["steps"],
            early_step=config.get("early_step", 0),
            policy=from_mapping(PolicyConfig, config.get("policy"), Place(source=str(path))),
            arms=tuple(_read_arm(study_dir, arm, config["seeds"]) for arm in arms),
        )
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"read_study: {path} must hold a study's config and arms, got {error!r}"
        ) from error


def _changed_since(paths: RunPaths, manifest: Manifest) -> str:
    """Return what is wrong with the log of a run that has ended; empty if nothing is."""
    listed = manifest.files.get(paths.metrics.name)
    if listed and (not paths.metrics.exists() or file_checksum(paths.metrics) != listed):
        return f"records can't be read: {paths.metrics} is not the one that the manifest lists"
    return ""


def _read_arm(study_dir: Path, arm: Mapping[str, Any], seeds: list[int]) -> RecordedArm:
    return RecordedArm(
        name=arm["name"],
        axis=arm["axis"],
        diff=arm["diff"],
        runs={
            seed: _read_run(RunPaths.for_run(study_dir, arm["name"], seed), seed) for seed in seeds
        },
    )


def _read_run(paths: RunPaths, seed: int) -> RecordedRun:
    manifest, metrics, counts, events, error = None, {}, {}, (), ""
    try:
        if paths.manifest.exists():
            manifest = read_manifest(paths.manifest)
        if paths.metrics.exists():
            metrics = read_metrics(paths.metrics)
            counts = read_counts(paths.metrics)
            events = tuple(read_events(paths.metrics))
        if manifest is not None and manifest.state in ENDED:
            error = _changed_since(paths, manifest)
    except (ValueError, OSError) as caught:
        error = f"records can't be read: {caught}"
    return RecordedRun(
        paths=paths,
        seed=seed,
        manifest=manifest,
        metrics=metrics,
        counts=counts,
        events=events,
        error=error,
    )
