"""The finished study as W&B shows it: the ladder's row in each run, and a run for the study itself.

That run holds the ladder and the deviations of each layer as tables, the HTML report, and the
verdict. A view of the records, like the report. Leaves out how W&B is reached (`tracking`), the
cells (`wandb_rows`) and its panels (`wandb_panels`).
"""

from pathlib import Path

import wandb

from stability.analysis.ladder import Ladder, ladder_of
from stability.analysis.study_records import RecordedStudy, read_study
from stability.analysis.verdict import answer_of
from stability.records.manifest import ENDED
from stability.records.paths import StudyPaths
from stability.records.sealed_json import file_checksum
from stability.report.wandb_rows import deviation_rows, ladder_rows, row_summary
from stability.tracking.wandb_environment import WandbMode, resolve_mode
from stability.tracking.wandb_logger import start_run
from stability.tracking.wandb_publish import publish_once, publish_run

__all__ = ["publish_study"]


def publish_study(study_dir: Path, mode: WandbMode) -> str:
    """Publish every run that has ended, and the study; return what went wrong, mostly nothing.

    `report.html` must have been written. Nothing that W&B does is an error of the study: its
    records are whole, and the next call publishes what is missing. ValueError as `read_study`.
    """
    mode = resolve_mode(mode)
    if mode == "disabled":
        return ""
    study = read_study(study_dir)
    ladder = ladder_of(study)
    try:
        for arm in study.arms:
            for run in arm.runs.values():
                if run.manifest is not None and run.state in ENDED:
                    summary = row_summary(ladder, arm.name, run.seed)
                    publish_run(mode, run.paths, run.manifest, summary)
        _publish_ladder(mode, study, ladder, StudyPaths(study_dir))
    except (wandb.Error, OSError, ValueError) as error:
        said = " ".join(str(error).split())
        return f"W&B is not up to date: {said}; the records are whole, the same command tries again"
    return ""


def _publish_ladder(
    mode: WandbMode, study: RecordedStudy, ladder: Ladder, paths: StudyPaths
) -> None:
    verdict = str(answer_of(study) or "no policy: the study names no candidate")

    def publish() -> None:
        run, _ = start_run(
            mode,
            paths.wandb_dir,
            name=study.name,
            group=study.name,
            job_type="study",
            tags=["study"],
            config={
                **{"study": study.name, "question": study.question, "seeds": list(study.seeds)},
                **{"yardstick": study.yardstick, "base": dict(study.base)},
            },
        )
        try:
            _fill(run, study, ladder, paths)
            run.summary.update({"verdict": verdict, "question": study.question})
        finally:  # else the next study would be written into this run
            run.finish()

    said = {"report": file_checksum(paths.report), "ladder": ladder.to_json(), "verdict": verdict}
    publish_once(mode, paths.wandb_dir, said, publish)


def _fill(run: wandb.Run, study: RecordedStudy, ladder: Ladder, paths: StudyPaths) -> None:
    columns, rows = ladder_rows(ladder)
    layers, figures = deviation_rows(study)
    run.log(
        {
            "ladder": wandb.Table(columns=columns, data=rows, allow_mixed_types=True),
            "deviations": wandb.Table(columns=layers, data=figures, allow_mixed_types=True),
            "report": wandb.Html(str(paths.report), inject=False),
        }
    )
