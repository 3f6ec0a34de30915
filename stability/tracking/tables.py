"""Builds the rows of W&B's summaries and tables from a study's verdict, ladder and deviations.

The input is plain: `ladder` is the content of ladder.json, and the numbers here are its numbers,
every digit. This file does not send anything (`publish`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stability.records.metric_names import parse_deviation
from stability.records.metric_table import LAYER_METRICS
from stability.records.sealed_json import NON_FINITE

__all__ = [
    "SHOWN_DEVIATIONS",
    "AlertLevel",
    "MetricValues",
    "alert_level",
    "deviation_rows",
    "evidence_rows",
    "ladder_rows",
    "outcome_summary",
    "row_summary",
]

AlertLevel = Literal["INFO", "WARN", "ERROR"]

MetricValues = tuple[str, str, Iterable[float]]
"""An arm, one of its metrics, and the values that one run logged."""

SHOWN_DEVIATIONS = (*LAYER_METRICS, "max_abs")
"""The deviation metrics that have a column in the table of layers, and panels."""


def row_summary(ladder: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Return an arm's row of the ladder for the summary of one of its runs.

    `ladder/rel_l2/early` is this seed's value, `ladder/rel_l2/early/mean` the mean over all seeds,
    and so on for the smallest and the largest; what was not measured is left out.
    """
    row = next(row for row in ladder["rows"] if row["arm"] == arm)
    summary: dict[str, Any] = {
        "ladder/early_step": ladder["early_step"],
        "ladder/last_step": ladder["last_step"],
    }
    for name, value in _flattened(row).items():
        *path, last = name.split("/")
        if path[-1:] == ["per_seed"]:
            if last == str(seed):
                summary["/".join(["ladder", *path[:-1]])] = value
        elif value is not None and last != "arm":
            summary[f"ladder/{name}"] = value
    return summary


def ladder_rows(ladder: Mapping[str, Any]) -> tuple[list[Any], list[Any]]:
    """Return the columns and rows of the ladder, the parts of a nested name joined by "/"."""
    rows = [_flattened(row) for row in ladder["rows"]]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[row.get(name) for name in columns] for row in rows]


def evidence_rows(arms: Iterable[Mapping[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Return columns, and a row for each judged arm and level of evidence.

    `arms` are verdicts on arms as JSON values (`analysis.verdict.ArmVerdict.to_dict`).
    """
    said = ("state", "cell", "sentence", "decides")
    rows: list[Any] = [
        [arm["arm"], arm["answer"], level, *(found[name] for name in said)]
        for arm in arms
        for level, found in arm["levels"].items()
    ]
    return ["arm", "verdict", "level", *said], rows


def outcome_summary(arms: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Return the answer on each arm for the study's summary; `arms` as in `evidence_rows`.

    What is broken on purpose stands under `control/`, since its FAIL is no failure of the study.
    """
    return {
        f"{'control' if arm['role'] == 'broken' else 'verdict'}/{arm['arm']}": arm["answer"]
        for arm in arms
    }


def alert_level(arms: Iterable[Mapping[str, Any]]) -> AlertLevel:
    """Return how loudly the verdict is told; `arms` as in `evidence_rows`.

    ERROR where a candidate fails; WARN where one does not pass, or an arm that is broken on purpose
    was not found to be.
    """
    outcomes = [(arm["role"] == "broken", arm["outcome"]) for arm in arms]
    if (False, "FAIL") in outcomes:
        return "ERROR"
    is_clear = all(
        outcome == ("FAIL" if is_control else "PASS") for is_control, outcome in outcomes
    )
    return "INFO" if is_clear and outcomes else "WARN"


def deviation_rows(logged: Iterable[MetricValues]) -> tuple[list[Any], list[Any]]:
    """Return columns, and a row for each arm, layer, shadow and result, over all seeds and steps.

    Each number is the finite value that is farthest from 0, or None if there is none.
    """
    worst: dict[tuple[str, ...], dict[str, float]] = {}
    for arm, name, values in logged:
        parts = parse_deviation(name)
        if parts is None or parts.part or parts.metric not in SHOWN_DEVIATIONS:
            continue
        row = worst.setdefault((arm, parts.layer, parts.shadow, parts.what), {})
        for value in values:
            if math.isfinite(value) and abs(value) >= abs(row.get(parts.metric, 0.0)):
                row[parts.metric] = value
    columns: list[Any] = ["arm", "layer", "shadow", "what", *SHOWN_DEVIATIONS]
    rows: list[Any] = [
        [*key, *(row.get(metric) for metric in SHOWN_DEVIATIONS)] for key, row in worst.items()
    ]
    return columns, rows


def _flattened(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested values by joined names; an interval becomes its two ends."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name == "interval":
            low, high = value or (None, None)
            value = {"low": low, "high": high}
        if isinstance(value, Mapping):
            flat |= _flattened(value, f"{prefix}{name}/")
        else:
            is_number = prefix and isinstance(value, str) and value in NON_FINITE
            flat[prefix + name] = float(value) if is_number else value
    return flat
