"""Publishes a study to W&B once its runs have ended: histories, summaries, tables and the report.

Each run gets what W&B lacks of its history, then its row of the ladder as summary. The study has a
run of its own, which holds the verdict, told by an alert too, the HTML report, and as tables the
evidence on four levels, the ladder and the deviations of each layer. What was published already is
left alone: a stamp beside W&B's files says what that was. This file reads no study (the command
line passes plain values) and shows no panels (`panels`).
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
    deviation_rows,
    evidence_rows,
    ladder_rows,
    outcome_summary,
    row_summary,
)
from stability.tracking.wandb_run import start_run

if TYPE_CHECKING:
    import wandb

__all__ = ["EndedRun", "StudyContent", "publish"]

_NAME_LENGTH = 128
"""The longest name of an artifact that W&B takes."""
_TITLE_LENGTH = 64
"""The longest title of an alert."""


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
    import wandb  # heavy

    ladder = json.loads(content.ladder)
    try:
        of_baseline = {
            run.manifest.seed: run.manifest.ranks
            for run in content.ended
            if run.manifest.arm == BASELINE
        }
        for run in content.ended:
            manifest = run.manifest
            ranks = of_baseline.get(manifest.seed, manifest.ranks)
            summary = row_summary(ladder, manifest.arm, manifest.seed)
            _publish_run(mode, run, summary, is_other_layout=manifest.ranks != ranks)
        _publish_study(mode, content)
    except (wandb.Error, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        return f"W&B is not up to date: {said}; the records are whole, the same command tries again"
    return ""


def _publish_run(
    mode: WandbMode, ended: EndedRun, summary: Mapping[str, Any], *, is_other_layout: bool
) -> None:
    """Send the history that W&B lacks, set the summary, and online send the snapshots."""
    paths, manifest = ended.paths, ended.manifest

    def send() -> None:
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
        )
        if shown is None:
            return
        try:
            shown.send_history(ended.drifts)
            shown.complete_summary()
            shown.run.summary.update(dict(summary))
            if mode == "online":
                _send_snapshots(shown.run, manifest.study, paths)
        finally:
            shown.close()

    stamped = {"summary": dict(summary), "files": manifest.files}
    if ended.drifts:
        stamped["drifts"] = {step: dict(values) for step, values in ended.drifts.items()}
    _publish_once(mode, paths.wandb_dir, stamped, send)


def _publish_study(mode: WandbMode, content: StudyContent) -> None:
    """Send the study's own run: tables, report and verdict, the verdict as an alert too."""

    paths, name = content.paths, content.config["study"]

    def send() -> None:
        run, _ = start_run(
            mode,
            paths.wandb_dir,
            name=name,
            group=name,
            job_type="study",
            tags=["study"],
            config=dict(content.config),
        )
        try:
            _send_tables(run, content)
            question = content.config["question"]
            answer = {"verdict": content.verdict, "question": question}
            run.summary.update(answer | outcome_summary(content.evidence))
            if content.evidence:
                _tell_once(mode, paths.wandb_dir, run, content)
        finally:  # else the next study would be written into this run
            run.finish()

    stamped = {
        "report": file_checksum(paths.report),
        "ladder": content.ladder,
        "verdict": content.verdict,
        "evidence": list(content.evidence),
    }
    _publish_once(mode, paths.wandb_dir, stamped, send)


def _tell_once(mode: WandbMode, directory: Path, run: "wandb.Run", content: StudyContent) -> None:
    """Send the verdict as an alert, unless it was told before: a new report is no news."""
    level, name = alert_level(content.evidence), content.config["study"]
    outcome = {"INFO": "PASS", "WARN": "not decided", "ERROR": "FAIL"}[level]
    text = f"{content.verdict}\n{content.config['question']}"

    def tell() -> None:
        run.alert(title=f"{name}: {outcome}"[-_TITLE_LENGTH:], text=text, level=level)

    _publish_once(mode, directory, {"level": level, "text": text}, tell, stamp="told")


def _publish_once(
    mode: WandbMode,
    directory: Path,
    content: Mapping[str, Any],
    send: Callable[[], None],
    *,
    stamp: str = "published",
) -> None:
    """Call `send`, unless it was called for the same content, mode and destination before.

    `content` is JSON values; `directory` is W&B's own, and keeps the stamp.
    """
    path = directory / f"{stamp}-{mode}.sha256"
    stamped = json.dumps([destination(), dict(content)], sort_keys=True)
    digest = hashlib.sha256(stamped.encode()).hexdigest()
    if path.exists() and read_plain(path) == f"{digest}\n".encode():
        return
    send()
    write_text(path, digest + "\n")


def _send_tables(run: "wandb.Run", content: StudyContent) -> None:
    import wandb  # heavy

    columns, rows = ladder_rows(json.loads(content.ladder))
    evidence_columns, evidence = evidence_rows(content.evidence)
    layer_columns, layer_rows = deviation_rows(content.deviations)
    run.log(
        {
            "evidence": wandb.Table(columns=evidence_columns, data=evidence),
            "ladder": wandb.Table(columns=columns, data=rows, allow_mixed_types=True),
            "deviations": wandb.Table(
                columns=layer_columns, data=layer_rows, allow_mixed_types=True
            ),
            "report": wandb.Html(str(content.paths.report), inject=False),
        }
    )


def _send_snapshots(run: "wandb.Run", study: str, paths: RunPaths) -> None:
    """Send every snapshot as a version of the artifact `<study>-<arm>-seed-<n>`, alias `step-<n>`.

    W&B stores equal files once, so to send them again costs a checksum.
    """
    import wandb  # heavy

    # Names of studies and arms hold only characters that W&B allows, but two may be too long.
    suffix = f"-{paths.arm}-seed-{paths.seed}"
    name = study[: _NAME_LENGTH - len(suffix)] + suffix
    for step in snapshot_steps(paths):
        artifact = wandb.Artifact(name, type="model", metadata={"step": step})
        # The files themselves, without a copy in W&B's cache: a snapshot is never written again.
        path = paths.held_snapshot(step)
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        add(str(path), policy="immutable", skip_cache=True)
        run.log_artifact(artifact, aliases=[f"step-{step}"])
