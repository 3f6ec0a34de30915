"""A study's panels in the W&B app: which metrics, over which axis, of which runs.

A view of the records: a panel is there only if the study has logged its metrics. Leaves out the
runs (`wandb_study`).
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Literal

from stability.analysis.probe_records import natural
from stability.analysis.study_records import RecordedStudy
from stability.records.metric_names import (
    COMPARED,
    STEP_AXIS,
    TRAIN_LOSS,
    WEIGHT_HISTOGRAM,
    parse_deviation,
    parse_drift,
)
from stability.report.wandb_rows import SHOWN_DEVIATIONS

__all__ = ["Panel", "PanelSection", "as_json", "plan_panels", "save_workspace"]

PanelKind = Literal["line", "bar", "media", "table"]

_ON_LOG_AXIS = {"rel_fro", "max_abs", "error_ratio", "w1", "w1_over_std", "mean_abs", "rel_l2"}
LADDER = ("ladder/rel_l2/early", "ladder/rel_l2/last", "ladder/ratio/early", "ladder/final_loss")
"""The bars: of each run's summary, averaged over the seeds of an arm."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel; lines are drawn over the optimizer step."""

    title: str
    kind: PanelKind
    metrics: tuple[str, ...]
    log: bool = False


@dataclass(frozen=True, slots=True)
class PanelSection:
    """Panels under one heading."""

    name: str
    panels: tuple[Panel, ...]


def plan_panels(study: RecordedStudy) -> list[PanelSection]:
    """Return the sections of a study's workspace, empty ones left out."""
    names = {name for arm in study.arms for run in arm.runs.values() for name in run.metrics}
    bars = tuple(Panel(name, "bar", (name,)) for name in LADDER)
    sections = [
        PanelSection(
            "Ladder",
            (
                *bars,
                Panel("every arm", "table", ("ladder",)),
                Panel("the report", "media", ("report",)),
            ),
        ),
        PanelSection("Loss", tuple(_lines([TRAIN_LOSS], names))),
        PanelSection("Drift from the baseline", tuple(_drifts(names))),
        PanelSection(
            "Deviation within each layer",
            (*_deviations(names), Panel("the worst of each layer", "table", ("deviations",))),
        ),
        PanelSection("Watch", tuple(_watched(names))),
        PanelSection("Weights", (Panel("sizes", "media", (WEIGHT_HISTOGRAM,)),)),
    ]
    return [section for section in sections if section.panels]


def as_json(study: RecordedStudy) -> dict[str, Any]:
    """Return the workspace as JSON values: whose runs, over which axis, and the sections."""
    return {
        "group": study.name,
        "grouped_by": "job_type",
        "x": STEP_AXIS,
        "sections": [asdict(section) for section in plan_panels(study)],
    }


def save_workspace(study: RecordedStudy, entity: str, project: str) -> str:
    """Make the study's workspace in `project` of `entity`, and return its address.

    ValueError without the package `wandb-workspaces`; W&B's own errors.
    """
    return _workspace(study, entity, project).save().url


def _workspace(study: RecordedStudy, entity: str, project: str) -> Any:
    try:
        import wandb_workspaces.workspaces as ws  # optional: the extra `workspace`
        from wandb_workspaces.expr import And, Metric
    except ImportError as error:
        raise ValueError(
            "save_workspace: the package wandb-workspaces must be installed, is not: "
            "pip install 'training-stability[workspace]'"
        ) from error
    sections = [
        ws.Section(name=section.name, panels=[_drawn(p) for p in section.panels], is_open=True)
        for section in plan_panels(study)
    ]
    runs = len(study.arms) * len(study.seeds) + 1  # and the study's own
    return ws.Workspace(
        entity=entity,
        project=project,
        name=study.name,
        sections=sections,
        auto_generate_panels=False,
        settings=ws.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=runs),
        runset_settings=ws.RunsetSettings(
            filters=And(Metric("Group") == study.name), groupby=[Metric("JobType")]
        ),
    )


def _drawn(panel: Panel) -> Any:
    import wandb_workspaces.reports.v2 as wr  # optional: the extra `workspace`

    if panel.kind == "line":
        lines: list[Any] = list(panel.metrics)
        return wr.LinePlot(title=panel.title, x=STEP_AXIS, y=lines, log_y=panel.log)
    if panel.kind == "bar":
        return wr.BarPlot(title=panel.title, metrics=list(panel.metrics), groupby="JobType")
    if panel.kind == "table":
        return wr.WeavePanelSummaryTable(table_name=panel.metrics[0])
    return wr.MediaBrowser(title=panel.title, media_keys=list(panel.metrics))


def _lines(wanted: Iterable[str], names: set[str]) -> list[Panel]:
    return [Panel(name, "line", (name,)) for name in wanted if name in names]


def _drifts(names: set[str]) -> list[Panel]:
    found = [(parts, name) for name in names if (parts := parse_drift(name))]
    return [
        Panel(f"{parts.metric} of all weights", "line", (name,), log=parts.metric in _ON_LOG_AXIS)
        for parts, name in sorted(found)
        if parts.parameter == "all"
    ]


def _deviations(names: set[str]) -> list[Panel]:
    """One panel for each result and metric, a line for each layer and shadow."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names, key=natural):
        parts = parse_deviation(name)
        if parts is not None and not parts.part and parts.metric in SHOWN_DEVIATIONS:
            lines.setdefault((parts.what, parts.metric), []).append(name)
    return [
        Panel(f"{metric} of {what}", "line", tuple(lines[what, metric]), metric in _ON_LOG_AXIS)
        for what in COMPARED
        for metric in SHOWN_DEVIATIONS
        if (what, metric) in lines
    ]


def _watched(names: set[str]) -> list[Panel]:
    """One panel for each figure of the run, and one for each figure of layers."""
    figures: dict[str, list[str]] = {}
    for name in sorted(names, key=natural):
        head, *layer, figure = name.split("/")
        if head == "watch" and layer[:1] != ["rms"] and len(layer) <= 1:
            figures.setdefault(figure, []).append(name)
    return [Panel(figure, "line", tuple(lines)) for figure, lines in sorted(figures.items())]
