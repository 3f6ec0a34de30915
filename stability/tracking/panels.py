"""Plans a study's panels in the W&B app: which metrics, over which axis, of which runs.

A panel is there only if W&B has what it shows: a metric that was logged, a key of the runs'
summaries, or a table. This file sends no runs and no
tables (`publish`); a panel refers to them by name.
"""

import contextlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from stability.records.atomic_files import make_folders, write_text
from stability.records.metric_names import (
    ALL_WEIGHTS,
    EVAL_LOSS,
    STEP_AXIS,
    TRAIN_LOSS,
    WEIGHT_HISTOGRAM,
    in_order,
    parse_deviation,
    parse_drift,
)
from stability.records.metric_table import DEVIATION_METRICS, DRIFT_METRICS, Metric
from stability.records.plain_files import read_plain
from stability.tracking.tables import SHOWN_DEVIATIONS

__all__ = ["Panel", "PanelSection", "as_json", "build_workspace", "plan_panels", "save_workspace"]

PanelKind = Literal["line", "bar", "media", "table"]

_EXCESS = "evidence/training/excess"
_COLUMNS = ("verdict", _EXCESS)
"""What stands beside each run's name."""
_LADDER_BARS = (
    "ladder/rel_l2/early",
    "ladder/rel_l2/last",
    "ladder/ratio/early",
    "ladder/final_loss",
)
"""Names in each run's summary; W&B draws their mean over the seeds of an arm."""


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel. Its lines are drawn over the optimizer step, on a log axis if `log` says so."""

    title: str
    kind: PanelKind
    metrics: tuple[str, ...]
    log: bool = False


@dataclass(frozen=True, slots=True)
class PanelSection:
    """Panels under one heading."""

    name: str
    panels: tuple[Panel, ...]


def plan_panels(names: Sequence[str]) -> list[PanelSection]:
    """Return the sections of a study's workspace, empty ones left out.

    `names` are those of everything that W&B has of the study; lines keep their order.
    """
    sections = [
        (
            "Evidence",
            [
                Panel("E, the excess of each judged arm", "bar", (_EXCESS,)),
                Panel("every arm and level", "table", ("evidence",)),
                Panel("the report", "media", ("report",)),
            ],
        ),
        (
            "Ladder",
            [
                *(Panel(name, "bar", (name,)) for name in _LADDER_BARS),
                Panel("every arm", "table", ("ladder",)),
            ],
        ),
        ("Loss", [Panel(name, "line", (name,)) for name in (TRAIN_LOSS, EVAL_LOSS)]),
        ("Drift from the baseline", _drifts(names)),
        (
            "Deviation within each layer",
            [*_deviations(names), Panel("the worst of each layer", "table", ("deviations",))],
        ),
        ("Watch", _watched(names)),
        ("Weights", [Panel("sizes", "media", (WEIGHT_HISTOGRAM,))]),
    ]
    known = set(names)
    shown = [
        PanelSection(name, tuple(panel for panel in panels if known.issuperset(panel.metrics)))
        for name, panels in sections
    ]
    return [section for section in shown if section.panels]


def as_json(group: str, names: Sequence[str]) -> dict[str, Any]:
    """Return the workspace as JSON values: whose runs, over which axis, and the sections."""
    return {
        "group": group,
        "grouped_by": "job_type",
        "x": STEP_AXIS,
        "sections": [asdict(section) for section in plan_panels(names)],
    }


def build_workspace(
    group: str, names: Sequence[str], *, runs: int, entity: str, project: str
) -> Any:
    """Return the workspace of the study `group`, not sent yet: its `save()` does that.

    `runs` is how many runs the study has in W&B. Raises ValueError without the package
    `wandb-workspaces`.
    """
    try:
        import wandb_workspaces.workspaces as ws  # optional: the extra `workspace`
        from wandb_workspaces.expr import And, Metric
    except ImportError as error:
        raise ValueError(
            "the package wandb-workspaces must be installed, is not: "
            "pip install 'training-stability[workspace]'"
        ) from error
    sections = [
        ws.Section(name=section.name, panels=[_drawn(p) for p in section.panels], is_open=True)
        for section in plan_panels(names)
    ]
    return ws.Workspace(
        entity=entity,
        project=project,
        name=group,
        sections=sections,
        auto_generate_panels=False,
        settings=ws.WorkspaceSettings(x_axis=STEP_AXIS, max_runs=runs),
        runset_settings=ws.RunsetSettings(
            filters=And(Metric("Group") == group),
            groupby=[Metric("JobType")],
            pinned_columns=[f"summary:{name}" for name in _COLUMNS if name in names],
        ),
    )


def save_workspace(built: Any, address: Path) -> str:
    """Save a workspace in the user's account, and return its address.

    The file `address` keeps it: the view that was saved before is replaced, unless it was deleted
    or is another project's.
    """
    import wandb_workspaces.workspaces as ws  # optional: the extra `workspace`

    if address.exists():
        with contextlib.suppress(ValueError):  # deleted, or no address
            known = ws.Workspace.from_url(read_plain(address).decode().strip())
            if (known.entity, known.project) == (built.entity, built.project):
                known.sections, known.settings = built.sections, built.settings
                known.runset_settings = built.runset_settings
                built = known
    url = str(built.save().url)
    make_folders(address.parent)
    write_text(address, url + "\n")
    return url


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


def _drifts(metrics: Sequence[str]) -> list[Panel]:
    """One panel for each drift of all weights; those of single parameters are not shown."""
    found = [(parts, name) for name in metrics if (parts := parse_drift(name))]
    return [
        _panel(f"{parts.metric} of all weights", (name,), DRIFT_METRICS.get(parts.metric))
        for parts, name in sorted(found)
        if parts.parameter == ALL_WEIGHTS
    ]


def _deviations(metrics: Sequence[str]) -> list[Panel]:
    """One panel for each result and metric, with a line for each layer and shadow."""
    lines: dict[tuple[str, str], list[str]] = {}
    for name in metrics:
        parts = parse_deviation(name)
        if parts is not None and not parts.part and parts.metric in SHOWN_DEVIATIONS:
            lines.setdefault((parts.what, parts.metric), []).append(name)
    return [
        _panel(f"{metric} of {what}", tuple(lines[what, metric]), DEVIATION_METRICS[metric])
        for what in in_order(what for what, _ in lines)
        for metric in SHOWN_DEVIATIONS
        if (what, metric) in lines
    ]


def _panel(title: str, names: tuple[str, ...], metric: Metric | None) -> Panel:
    return Panel(title, "line", names, log=metric is not None and metric.scale == "log")


def _watched(metrics: Sequence[str]) -> list[Panel]:
    """One panel for each watched metric of the run, and one for each watched metric of layers."""
    lines: dict[str, list[str]] = {}
    for name in metrics:
        head, *layer = name.split("/")
        watched = layer.pop() if layer else ""
        if head == "watch" and watched and layer[:1] != ["rms"] and len(layer) <= 1:
            lines.setdefault(watched, []).append(name)
    return [Panel(watched, "line", tuple(names)) for watched, names in sorted(lines.items())]
