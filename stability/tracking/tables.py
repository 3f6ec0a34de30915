"""Builds the rows of W&B's summaries and tables from a study's verdict, ladder and deviations.

The input is plain: `ladder` is the content of ladder.json, and the numbers here are its numbers,
every digit. A number that is none, NaN or infinite, is missing: W&B's tables are JSON, which has
neither. This file does not send anything (`publish`).
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from stability.records.figure_table import figure_of
from stability.records.metric_names import STEP_AXIS, parse_deviation
from stability.records.metric_table import LAYER_METRICS
from stability.records.sealed_json import NON_FINITE

__all__ = [
    "DEVIATION_COLUMNS",
    "EVIDENCE_COLUMNS",
    "NAME_PARTS",
    "RUN_SUMMARY",
    "SHOWN_DEVIATIONS",
    "SPREAD",
    "STUDY_SUMMARY",
    "STUDY_TABLES",
    "AlertLevel",
    "MetricValues",
    "TableContent",
    "alert_level",
    "column_types",
    "deviation_rows",
    "evidence_rows",
    "ladder_rows",
    "outcome_summary",
    "run_summary",
    "study_tables",
]

AlertLevel = Literal["INFO", "WARN", "ERROR"]

MetricValues = tuple[str, str, Iterable[float]]
"""An arm, one of its metrics, and the values that one run logged."""

TableContent = tuple[list[Any], list[Any]]
"""Columns and rows; None in a cell is a value that is missing."""

_TEXT = ("cell", "sentence", "decides")
"""Columns of text that may be empty in every row."""
RUN_SUMMARY = {
    "verdict": "the answer on the run's arm, where that is judged",
    STEP_AXIS: "updates made before what is drawn over it",
    "ladder/early_step": "the early step of the ladder",
    "ladder/last_step": "the last step of the ladder",
    "evidence/LEVEL/state": "`holds`, `harmed`, `undecided`, `not applicable` or `not measured`",
}
"""What the summary of each run has besides its arm's row of the ladder and a level's figures."""

STUDY_SUMMARY = {
    "verdict": "the study's answer in a line",
    "question": "what the study asks",
    "verdict/ARM": "the answer on each arm that is judged",
    "control/ARM": "the answer on each arm that is broken on purpose",
}
"""What the summary of the study's own run has."""

STUDY_TABLES = {
    "evidence": "each judged arm and level, with every figure behind the level's sentence",
    "ladder": "the row of each `arm`; its other columns are named as in the summary of a run, "
    "without `ladder/`, and `per_seed/N` is the value of seed N",
    "deviations": "the worst deviation of each arm, layer, shadow and result",
    "report": "the HTML report",
}
"""What the study's own run shows."""

EVIDENCE_COLUMNS = {
    "arm": "the arm that is judged",
    "role": "what it is there for",
    "verdict": "the answer on it",
    "level": "`operator`, `gradient`, `training` or `outcome`",
    "state": RUN_SUMMARY["evidence/LEVEL/state"],
    "cell": "the finding in at most 16 characters",
    "p_harmed": "chance of such evidence if the harm is within its limit",
    "p_holds": "chance of such evidence if the harm exceeds its limit",
    "sentence": "the finding in words",
    "decides": "what would decide it; none where it is decided",
}
"""The columns of the table `evidence` besides the figures of all levels."""

DEVIATION_COLUMNS = {
    "arm": "the arm",
    "layer": "the layer",
    "shadow": "the shadow, where a probe has several",
    "what": "the result that is compared",
}
"""The columns of the table `deviations` besides `SHOWN_DEVIATIONS`."""

SPREAD = {
    "n": "seeds that were measured",
    "mean": "mean of the seeds",
    "min": "smallest seed",
    "max": "largest seed",
    "interval/low": "lower end of the 90 % interval of the mean",
    "interval/high": "upper end of the 90 % interval of the mean",
}
"""What stands behind the name of a quantity that each seed has a value of."""

NAME_PARTS = {
    "ARM": "an arm",
    "LEVEL": EVIDENCE_COLUMNS["level"],
    "AT": "`early` or `last`: a step of the ladder",
    "SPREAD": "what is said of all seeds; left out for the value of the run's own",
}
"""What stands in a name in the place of a word in capitals."""

SHOWN_DEVIATIONS = (*LAYER_METRICS, "max_abs")
"""The deviation metrics that have a column in the table of layers, and panels."""


def run_summary(
    ladder: Mapping[str, Any], arms: Iterable[Mapping[str, Any]], arm: str, seed: int
) -> dict[str, Any]:
    """Return the summary of one run: its arm's row of the ladder, and the verdict on the arm.

    `ladder/rel_l2/early` is this seed's value, `ladder/rel_l2/early/mean` the mean over all seeds,
    and so on for the smallest and the largest. Where the arm was judged, `verdict` is the answer,
    `evidence/training/state` a level's state and `evidence/training/excess` a figure behind it,
    over all seeds; `arms` as in `evidence_rows`. What was not measured is left out.
    """
    return _row_summary(ladder, arm, seed) | _evidence_summary(arms, arm)


def study_tables(
    ladder: Mapping[str, Any],
    arms: Iterable[Mapping[str, Any]],
    logged: Iterable[MetricValues],
) -> dict[str, TableContent]:
    """Return the tables of a study by name, those without rows left out."""
    tables = {
        "evidence": evidence_rows(arms),
        "ladder": ladder_rows(ladder),
        "deviations": deviation_rows(logged),
    }
    return {name: table for name, table in tables.items() if table[1]}


def ladder_rows(ladder: Mapping[str, Any]) -> TableContent:
    """Return the columns and rows of the ladder, the parts of a nested name joined by "/"."""
    return _table([_flattened(row) for row in ladder["rows"]])


def evidence_rows(arms: Iterable[Mapping[str, Any]]) -> TableContent:
    """Return columns, and a row for each judged arm and level of evidence.

    `arms` are verdicts on arms as JSON values (`analysis.verdict.ArmVerdict.to_dict`). Every figure
    behind a level's sentence has a column, and is missing in the rows of other levels.
    """
    levels = [(arm, level, found) for arm in arms for level, found in arm["levels"].items()]
    figures = dict.fromkeys(name for *_, found in levels for name in _figures(found))
    return _table(
        [
            {
                "arm": arm["arm"],
                "role": arm["role"],
                "verdict": arm["answer"],
                "level": level,
                "state": found["state"],
                "cell": found["cell"] or None,
                **figures,
                **_figures(found),
                "p_harmed": _number(found["p_harmed"]),
                "p_holds": _number(found["p_holds"]),
                "sentence": found["sentence"],
                "decides": found["decides"] or None,
            }
            for arm, level, found in levels
        ]
    )


def column_types(columns: Iterable[Any], rows: Iterable[list[Any]]) -> list[type]:
    """Return `str` or `float` for each column; W&B sorts and draws those of numbers alone."""
    by_column = list(zip(*rows, strict=True))
    return [
        str if name in _TEXT or any(isinstance(cell, str) for cell in cells) else float
        for name, cells in zip(columns, by_column, strict=True)
    ]


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


def deviation_rows(logged: Iterable[MetricValues]) -> TableContent:
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
    empty = dict.fromkeys(SHOWN_DEVIATIONS)
    return _table(
        [dict(zip(DEVIATION_COLUMNS, key, strict=True)) | empty | row for key, row in worst.items()]
    )


def _row_summary(ladder: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
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


def _evidence_summary(arms: Iterable[Mapping[str, Any]], arm: str) -> dict[str, Any]:
    summary: dict[str, Any] = {}
    for judged in arms:
        if judged["arm"] == arm:
            summary["verdict"] = judged["answer"]
            for level, found in judged["levels"].items():
                summary[f"evidence/{level}/state"] = found["state"]
                for name, value in _figures(found).items():
                    if value is not None:
                        summary[f"evidence/{level}/{name}"] = value
    return summary


def _figures(evidence: Mapping[str, Any]) -> dict[str, float | None]:
    """Return the figures of a level over all seeds and steps; None for one that is no number."""
    return {
        name: _number(value)
        for name, value in evidence["figures"].items()
        if figure_of(name) == name  # that of one seed or step is left out
    }


def _number(value: float | str) -> float | None:
    """Return a number as it stands in JSON values, where NaN and infinity are text."""
    number = float(value)
    return number if math.isfinite(number) else None


def _table(rows: list[dict[str, Any]]) -> TableContent:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    return columns, [[_cell(row.get(name)) for name in columns] for row in rows]


def _cell(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
