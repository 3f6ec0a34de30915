"""One figure for a paper from a study's records; the same records give the same bytes.

Leaves out what each kind shows (`ladder`, `drift`, `heatmap`, `waterfall`) and how it looks
(`style`).
"""

from pathlib import Path

from matplotlib.figure import Figure

from stability.analysis.ladder import ladder_of
from stability.analysis.study_records import RecordedArm, RecordedStudy, find_arm
from stability.records.paths import RunPaths
from stability.records.waterfall_record import WaterfallRecord, read_waterfalls
from stability.report.paper.drift import draw_drift, drift_table
from stability.report.paper.figure_options import NothingToDrawError
from stability.report.paper.files import Table, write_files
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
        try:
            figure, table = _drawn(study, kind, width, arm, compared, metric)
        except NothingToDrawError as error:
            lost = _lost(study)
            raise ValueError(f"{error}; {lost}" if lost else str(error)) from error
        return write_files(path, figure, table)


def _lost(study: RecordedStudy) -> str:
    """Return the first thing that is wrong with a run of the study, or which run is missing."""
    runs = [run for each in study.arms for run in each.runs.values()]
    wrong = [run.error or run.breach for run in runs if run.error or run.breach]
    missing = [
        f"{each.name}/seed-{seed} is not on record"
        for each in study.arms
        for seed in study.seeds
        if seed not in each.runs or each.runs[seed].manifest is None
    ]
    return next(iter((*wrong, *missing)), "")


def _drawn(
    study: RecordedStudy, kind: str, width: str, arm: str, compared: str, metric: str
) -> tuple[Figure, Table]:
    if kind == "ladder":
        ladder = ladder_of(study)
        arms = [each.name for each in study.arms]
        return draw_ladder(ladder, arms, width), ladder_table(ladder)
    if kind == "drift":
        return draw_drift(study, arm, metric, width), drift_table(study, arm, metric)
    if kind == "heatmap":
        probed = _probed(study, arm, compared, metric)
        table = heatmap_table(probed, compared, metric)
        return draw_heatmap(probed, compared, metric, width), table
    run, record = _waterfall(study, arm)
    return draw_waterfall(record, width), waterfall_table(run, record)


def _probed(study: RecordedStudy, arm: str, compared: str, metric: str) -> RecordedArm:
    """Return the arm called `arm`, or the first that has such a deviation, candidates first."""
    if arm:
        return find_arm(study, arm)
    arms = sorted(study.arms, key=lambda each: not is_candidate(each))
    for each in arms:
        if has_probe(each, compared, metric):
            return each
    raise NothingToDrawError(
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
    raise NothingToDrawError(
        f"write_figure: waterfall must be on record, there is none in {arm or study.name!r}; run "
        "`stability deviate --waterfall --checkpoint RUN --record`, RUN being a run's folder"
    )
