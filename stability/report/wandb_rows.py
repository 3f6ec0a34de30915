"""What W&B's summaries and tables hold: the ladder and the layers' deviations, as plain rows.

The numbers are those of ladder.json, every digit. Leaves out W&B itself (`wandb_study`).
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from stability.analysis.ladder import Ladder
from stability.analysis.study_records import RecordedArm, RecordedStudy
from stability.records.metric_names import parse_deviation
from stability.records.sealed_json import NON_FINITE

__all__ = ["SHOWN_DEVIATIONS", "deviation_rows", "ladder_rows", "row_summary"]

SHOWN_DEVIATIONS = ("rel_fro", "max_abs", "bias_ulp", "error_ratio")
"""The columns of the table of layers."""


def row_summary(ladder: Ladder, arm: str, seed: int) -> dict[str, Any]:
    """Return an arm's row of the ladder for the summary of one of its runs.

    `ladder/rel_l2/early` is this seed's value, `ladder/rel_l2/early/mean` that of all seeds, and so
    on for the smallest and the largest; what was not measured is left out.
    """
    content = json.loads(ladder.to_json())
    row = next(row for row in content["rows"] if row["arm"] == arm)
    found: dict[str, Any] = {
        "ladder/early_step": ladder.early_step,
        "ladder/last_step": ladder.last_step,
    }
    for name, value in _flat(row).items():
        *path, last = name.split("/")
        if path[-1:] == ["per_seed"]:
            if last == str(seed):
                found["/".join(["ladder", *path[:-1]])] = value
        elif value is not None and last != "arm":
            found[f"ladder/{name}"] = value
    return found


def ladder_rows(ladder: Ladder) -> tuple[list[Any], list[Any]]:
    """Return the columns and rows of ladder.json, a nested name's parts joined by "/"."""
    rows = [_flat(row) for row in json.loads(ladder.to_json())["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def deviation_rows(study: RecordedStudy) -> tuple[list[Any], list[Any]]:
    """Return a row for each layer, shadow and result of each arm, over all seeds and steps.

    A figure is the finite value that is farthest from 0, None if there is none.
    """
    worst: dict[tuple[str, ...], dict[str, float]] = {}
    for arm in study.arms:
        for name, value in _deviations(arm):
            parts = parse_deviation(name)
            if parts is None or parts.part or parts.metric not in SHOWN_DEVIATIONS:
                continue
            row = worst.setdefault((arm.name, parts.layer, parts.shadow, parts.what), {})
            if math.isfinite(value) and abs(value) >= abs(row.get(parts.metric, 0.0)):
                row[parts.metric] = value
    columns: list[Any] = ["arm", "layer", "shadow", "what", *SHOWN_DEVIATIONS]
    rows: list[Any] = [
        [*key, *(row.get(metric) for metric in SHOWN_DEVIATIONS)] for key, row in worst.items()
    ]
    return columns, rows


def _deviations(arm: RecordedArm) -> list[tuple[str, float]]:
    return [
        (name, value)
        for run in arm.runs.values()
        for name, series in run.metrics.items()
        for value in series.values
    ]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by joined names; an interval becomes its two ends."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name == "interval":
            low, high = value or (None, None)
            value = {"low": low, "high": high}
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{name}/")
        else:
            is_number = prefix and isinstance(value, str) and value in NON_FINITE
            found[prefix + name] = float(value) if is_number else value
    return found
