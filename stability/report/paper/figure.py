"""One figure for a paper from a study's records; the same records give the same bytes.

Leaves out what each kind shows (`ladder`, `drift`, `heatmap`, `waterfall`) and how it looks
(`style`).
"""

from pathlib import Path

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import RecordedArm, RecordedStudy, find_arm
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, read_waterfalls
from stability.report.paper.drift import draw_drift, drift_table
from stability.report.paper.files import write_files
from stability.report.paper.heatmap import draw_heatmap, has_probe, heatmap_table
from stability.report.paper.ladder import draw_ladder, ladder_table
from stability.report.paper.style import paper_style
from stability.report.paper.waterfall import draw_waterfall, waterfall_table
from stability.report.view.ladder import is_candidate

__all__ = ["write_figure"]


def write_figure(
    study: RecordedStudy,
    kind: str,
    path: Path,
    *,
    width: str,
    arm: str = "",
    compared: str = "out",
    metric: str = "rel_l2",
) -> Path:
    """Write the figure of `kind`, one of `KINDS`, to `path` and return the file of its numbers.

    `path` ends in one of `FORMATS`; `width` is a key of `WIDTHS`. ValueError if the
    study has no such arm, or nothing on record to draw: it says what to run.
    """
    with paper_style():
        if kind == "ladder":
            ladder = ladder_of(study)
            arms = [each.name for each in study.arms]
            figure, table = draw_ladder(ladder, arms, width), ladder_table(ladder)
        elif kind == "drift":
            figure = draw_drift(study, arm, metric, width)
            table = drift_table(study, arm, metric)
        elif kind == "heatmap":
            probed = _probed(study, arm, compared, metric)
            figure = draw_heatmap(probed, compared, metric, width)
            table = heatmap_table(probed, compared, metric)
        else:
            run, record = _waterfall(study, arm)
            figure, table = draw_waterfall(record, width), waterfall_table(run, record)
        return write_files(path, figure, table)


def _probed(study: RecordedStudy, arm: str, compared: str, metric: str) -> RecordedArm:
    """Return the arm called `arm`, or the first that has such a deviation, candidates first."""
    if arm:
        return find_arm(study, arm)
    arms = sorted(study.arms, key=lambda each: not is_candidate(each))
    for each in arms:
        if has_probe(each, compared, metric):
            return each
    raise ValueError(
        f"write_figure: heatmap must have {metric} of {compared} to draw, no arm has it on record; "
        "give the study a `probe:` and run it"
    )


def _waterfall(study: RecordedStudy, arm: str) -> tuple[RunPaths, WaterfallRecord]:
    """Return the last waterfall on record of the first run that has one."""
    arms = [find_arm(study, arm)] if arm else study.arms
    for each in arms:
        for run in each.runs.values():
            found = read_waterfalls([run.paths])
            if found:
                return max(found, key=lambda pair: pair[1].step)
    raise ValueError(
        f"write_figure: waterfall must be on record, there is none in {arm or study.name!r}; run "
        "`stability deviate --waterfall --checkpoint RUN --record`, RUN being a run's folder"
    )
