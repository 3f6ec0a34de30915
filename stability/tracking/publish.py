"""Publishes a study to W&B once its runs have ended: histories, summaries, tables and the report.

Each run gets what W&B lacks of its history, then its row of the ladder as summary. The study has a
run of its own, which holds the verdict, told by an alert too, the HTML report, and as tables the
evidence on four levels, the ladder and the deviations of each layer. What was published already is
left alone: a stamp beside W&B's files says what that was. This file reads no study (the command
line passes plain values) and shows no panels (`panels`).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from stability.config.schema import BASELINE
from stability.records.atomic_files import write_text
from stability.records.manifest import Manifest
from stability.records.paths import RunPaths, StudyPaths, snapshot_steps
from stability.records.plain_files import read_plain
from stability.records.sealed_json import file_checksum
from stability.tracking.environment import WandbMode, destination
from stability.tracking.history import open_wandb_run
from stability.tracking.tables import (
    MetricValues,
    alert_level,
    column_types,
    outcome_summary,
    run_summary,
    study_tables,
)
from stability.tracking.wandb_run import start_run, told_in_a_line, was_uploaded

if TYPE_CHECKING:
    import wandb

__all__ = ["EndedRun", "StudyContent", "publish", "shown_names"]

_REPORT = "report"
_NAME_LENGTH = 128
"""The longest name of an artifact that W&B takes."""
_TITLE_LENGTH = 64
"""The longest title of an alert."""
_PATIENCE_S = 90
"""How long a run waits for W&B's server, at its start and at its end."""
_SLOWEST = 1e6
"""Bytes of snapshots a second: a slower line is not waited for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StudyContent:
    """A study as W&B is to show it, in plain values."""

    paths: StudyPaths
    """The report must have been written."""
    config: Mapping[str, Any]
    """study, question, seeds, yardstick and base."""
    verdict: str
    """The answer in one line."""
    evidence: Sequence[Mapping[str, Any]]
    """The verdict on each arm that was judged, as `ArmVerdict.to_dict`."""
    ladder: str
    """The text of ladder.json."""
    deviations: Iterable[MetricValues]
    ended: Sequence["EndedRun"]
    """The runs that will not go on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRun:
    """A run that will not go on, and what is to be shown in the place of its log's drifts."""

    paths: RunPaths
    manifest: Manifest
    drifts: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """By step: those that were computed anew, none where they are stale."""


def publish(content: StudyContent, mode: WandbMode) -> str:
    """Publish every run that has ended, and the study; return what went wrong, mostly nothing.

    Nothing that W&B does is an error of the study: the records are whole, and the next call
    publishes what is missing.
    """
    if mode == "disabled":
        return ""
    try:
        with told_in_a_line():
            _publish_runs(mode, content)
            _publish_study(mode, content)
    except (OSError, ValueError) as error:
        said = " ".join(str(error).split())
        return f"W&B is not up to date: {said}; the records are whole, the same command tries again"
    return ""


def shown_names(content: StudyContent) -> set[str]:
    """Return the keys of the runs' summaries and the names of the study's tables and report."""
    ladder = json.loads(content.ladder)
    names = {_REPORT, *study_tables(ladder, content.evidence, content.deviations)}
    for run in content.ended:
        names |= run_summary(ladder, content.evidence, run.manifest.arm, run.manifest.seed).keys()
    return names


def _publish_runs(mode: WandbMode, content: StudyContent) -> None:
    ladder = json.loads(content.ladder)
    of_baseline = {
        run.manifest.seed: run.manifest.ranks
        for run in content.ended
        if run.manifest.arm == BASELINE
    }
    for run in content.ended:
        manifest = run.manifest
        ranks = of_baseline.get(manifest.seed, manifest.ranks)
        summary = run_summary(ladder, content.evidence, manifest.arm, manifest.seed)
        _publish_run(mode, run, summary, is_other_layout=manifest.ranks != ranks)


def _publish_run(
    mode: WandbMode, ended: EndedRun, summary: Mapping[str, Any], *, is_other_layout: bool
) -> None:
    """Send the history that W&B lacks, set the summary, and online send the snapshots."""
    paths, manifest = ended.paths, ended.manifest
    stamped = {"summary": dict(summary), "files": manifest.files}
    if ended.drifts:
        stamped["drifts"] = {step: dict(values) for step, values in ended.drifts.items()}
    stamp = _Stamp.of("published", mode, stamped)
    if stamp.is_in(paths.wandb_dir):
        return
    steps = snapshot_steps(paths) if mode == "online" else ()
    snapshots = {step: paths.held_snapshot(step) for step in steps}
    shown = open_wandb_run(
        mode,
        study=manifest.study,
        arm=manifest.arm,
        seed=manifest.seed,
        axis=manifest.axis,
        changes=manifest.diff,
        config=manifest.config,
        paths=paths,
        is_other_layout=is_other_layout,
        patience_s=_PATIENCE_S + sum(map(_size_of, snapshots.values())) / _SLOWEST,
    )
    if shown is None:
        return
    try:
        shown.send_history(ended.drifts)
        shown.complete_summary()
        shown.run.summary.update(dict(summary))
        _send_snapshots(shown.run, manifest.study, paths, snapshots)
    finally:
        shown.close()
    stamp.write(paths.wandb_dir)


def _publish_study(mode: WandbMode, content: StudyContent) -> None:
    """Send the study's own run: tables, report and verdict, the verdict as an alert too."""
    directory, name = content.paths.wandb_dir, content.config["study"]
    question, evidence = content.config["question"], content.evidence
    stamp = _Stamp.of(
        "published",
        mode,
        {
            "report": file_checksum(content.paths.report),
            "ladder": content.ladder,
            "verdict": content.verdict,
            "evidence": list(evidence),
        },
    )
    if stamp.is_in(directory):
        return
    run, _ = start_run(
        mode,
        directory,
        name=name,
        group=name,
        job_type="study",
        tags=["study"],
        config=dict(content.config),
        patience_s=_PATIENCE_S,
    )
    level, text = alert_level(evidence), f"{content.verdict}\n{question}"
    told = _Stamp.of("told", mode, {"level": level, "text": text})
    # Offline it lies beside the alert: a folder that was never uploaded is deleted with both.
    folder = Path(run.dir).parent if mode == "offline" else directory
    is_news = _last_told(directory) != told.digest.encode()
    try:
        _send_tables(run, content)
        answer = {"verdict": content.verdict, "question": question}
        run.summary.update(answer | outcome_summary(evidence))
        if evidence and is_news:
            outcome = {"INFO": "PASS", "WARN": "not decided", "ERROR": "FAIL"}[level]
            run.alert(title=f"{name}: {outcome}"[-_TITLE_LENGTH:], text=text, level=level)
    finally:  # else the next study would be written into this run
        run.finish()
    if evidence and is_news:
        told.write(folder)
    stamp.write(directory)


def _last_told(directory: Path) -> bytes:
    """Return the digest of the alert that W&B's server had last, in either mode; b"" for none."""
    folders = [x for x in directory.glob("offline-run-*") if was_uploaded(x)]
    stamps = [stamp for folder in (directory, *folders) for stamp in folder.glob("told-*.sha256")]
    newest = max(stamps, key=lambda stamp: stamp.stat().st_mtime_ns, default=None)
    return read_plain(newest) if newest else b""


@dataclass(frozen=True, slots=True)
class _Stamp:
    """A file that says what was sent, and where to: so it is not sent again."""

    name: str
    digest: str

    @classmethod
    def of(cls, what: str, mode: WandbMode, content: Mapping[str, Any]) -> Self:
        """Return the stamp of `content`, which is JSON values."""
        stamped = json.dumps([destination(), dict(content)], sort_keys=True)
        return cls(f"{what}-{mode}.sha256", hashlib.sha256(stamped.encode()).hexdigest() + "\n")

    def is_in(self, folder: Path) -> bool:
        """Whether what the stamp stands for was sent before."""
        path = folder / self.name
        return path.exists() and read_plain(path) == self.digest.encode()

    def write(self, folder: Path) -> None:
        """Say that it was sent."""
        write_text(folder / self.name, self.digest)


def _send_tables(run: "wandb.Run", content: StudyContent) -> None:
    import wandb  # heavy

    tables = study_tables(json.loads(content.ladder), content.evidence, content.deviations)
    shown: dict[str, Any] = {
        name: wandb.Table(columns=columns, data=rows, dtype=column_types(columns, rows))
        for name, (columns, rows) in tables.items()
    }
    run.log(shown | {_REPORT: wandb.Html(str(content.paths.report), inject=False)})


def _size_of(snapshot: Path) -> int:
    files = snapshot.rglob("*") if snapshot.is_dir() else [snapshot]
    return sum(path.stat().st_size for path in files)


def _send_snapshots(
    run: "wandb.Run", study: str, paths: RunPaths, snapshots: Mapping[int, Path]
) -> None:
    """Send every snapshot as a version of the artifact `<study>-<arm>-seed-<n>`, alias `step-<n>`.

    W&B stores equal files once, so to send them again costs a checksum.
    """
    import wandb  # heavy

    # Names of studies and arms hold only characters that W&B allows, but two may be too long.
    suffix = f"-{paths.arm}-seed-{paths.seed}"
    name = study[: _NAME_LENGTH - len(suffix)] + suffix
    for step, path in snapshots.items():
        artifact = wandb.Artifact(name, type="model", metadata={"step": step})
        # The files themselves, without a copy in W&B's cache: a snapshot is never written again.
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=[f"step-{step}"])
