"""W&B's view of a study: `stability workspace`, and what `stability run` publishes at its end.

This file turns a recorded study into the plain values that `stability.tracking` takes.
"""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stability.cli.output import HOLDS, print_json, print_line

if TYPE_CHECKING:
    from stability.analysis.study_records import RecordedStudy
    from stability.analysis.verdict import StudyVerdict
    from stability.tracking.environment import WandbMode
    from stability.tracking.publish import StudyContent

__all__ = ["evidence_of", "publish_study", "workspace", "workspace_names"]


def workspace(study: Path, json: bool = False) -> int:
    """Save a view in the W&B app, its arms grouped: evidence, ladder, loss, drift and more.

    The study's runs must be online, by `stability run --wandb online` or `wandb sync`.

    Args:
        study: the folder of a study, e.g. runs/quickstart
        json: print which panels there would be, and send nothing
    """
    # heavy: a mistake in the command is told first
    from stability.analysis.study_records import read_study
    from stability.tracking.panels import as_json

    recorded = read_study(study)
    if json:
        print_json(as_json(recorded.name, workspace_names(recorded)))
    else:
        print_line(_save_workspace(recorded))
    return HOLDS


def publish_study(study: "RecordedStudy", folder: Path, mode: "WandbMode") -> str:
    """Publish to W&B what has ended of a study; return what went wrong, mostly nothing.

    `report.html` must have been written into `folder`.
    """
    from stability.tracking.publish import publish  # heavy: torch

    return publish(_content(study, folder), mode)


def _content(study: "RecordedStudy", folder: Path) -> "StudyContent":
    from stability.analysis.ladder import ladder_of, yardstick_of  # heavy: numpy
    from stability.records.manifest import ENDED
    from stability.records.paths import StudyPaths
    from stability.report.view.evidence import headline, verdict_of
    from stability.tracking.publish import EndedRun, StudyContent

    runs = [run for arm in study.arms for run in arm.runs.values()]
    verdict = verdict_of(study)
    return StudyContent(
        paths=StudyPaths(folder),
        config={
            "study": study.name,
            "question": study.question,
            "seeds": list(study.seeds),
            "yardstick": yardstick_of(study),
            "base": dict(study.base),
        },
        verdict=headline(verdict) if verdict else "nothing to judge: no arm is a candidate",
        evidence=evidence_of(verdict) if verdict else (),
        ladder=ladder_of(study).to_json(),
        deviations=(
            (arm.name, name, series.values)
            for arm in study.arms
            for run in arm.runs.values()
            for name, series in run.metrics.items()
        ),
        ended=[
            EndedRun(
                paths=run.paths,
                manifest=run.manifest,
                drifts={**{step: {} for step in run.stale}, **run.remade},
            )
            for run in runs
            if run.manifest and run.state in ENDED
        ],
    )


def evidence_of(verdict: "StudyVerdict") -> list[dict[str, Any]]:
    """Return the verdict on each arm; after a change of the protocol none of them is proven."""
    arms = verdict.to_dict()["arms"]
    if verdict.exploratory:
        for arm in arms:
            arm["answer"], arm["outcome"] = f"EXPLORATORY: {arm['answer']}", "EXPLORATORY"
    return arms


def _save_workspace(study: "RecordedStudy") -> str:
    """Make the workspace in the user's account, and return its address."""
    import wandb  # heavy

    from stability.records.paths import StudyPaths
    from stability.tracking.environment import (
        check_account,
        check_not_offline,
        check_settings,
        project,
    )
    from stability.tracking.panels import build_workspace, save_workspace

    check_not_offline()
    check_settings("online")
    check_account("`--json` prints the panels without")
    try:
        entity = os.environ.get("WANDB_ENTITY") or wandb.Api().default_entity or ""
        built = build_workspace(
            study.name,
            workspace_names(study),
            runs=len(study.arms) * len(study.seeds) + 1,  # and the study's own
            entity=entity,
            project=project(),
        )
        return save_workspace(built, StudyPaths(study.folder).wandb_dir / "view.txt")
    except wandb.Error as error:
        raise ValueError(f"workspace: W&B refuses: {error}; try again later") from error


def workspace_names(study: "RecordedStudy") -> list[str]:
    """Return the name of everything that W&B has of the study once it is published.

    They are what its runs have logged, the keys of their summaries, and the tables, in natural
    order.
    """
    from stability.analysis.probe_records import natural_order  # heavy
    from stability.tracking.publish import shown_names

    runs = [run for arm in study.arms for run in arm.runs.values()]
    names = {name for run in runs for name in (*run.metrics, *run.counts)}
    return sorted(names | shown_names(_content(study, study.folder)), key=natural_order)
