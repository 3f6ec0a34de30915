"""What `stability deviate` prints: a row a point, a waterfall, published beside measured.

It fits 80 columns: what does not vary stands above the table, not in it. Leaves out the measuring
(`probe.microbenchmark`) and the charts (`page.operator_charts`).
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

from stability.report.terminal.tables import add_row, first_that_fits, ruled_table
from stability.report.view.plain_text import as_text

__all__ = [
    "COLUMNS",
    "metric_of",
    "print_points",
    "print_published",
    "print_ties",
    "print_waterfall",
]

COLUMNS = ("rmse", "max_abs", "bias_ulp", "error_ratio")
"""Shown unless others are asked for; of the candidate against the golden."""
BAR = 18
HEADINGS = {
    "none": "as the profile says",
    "lowered": "each point alone lowered to the profile's format, all others FP64",
    "raised": "each point alone raised to FP64, the rest as the profile says",
}


def print_points(
    rows: Sequence[Mapping[str, Any]],
    varied: Sequence[str],
    columns: Sequence[str],
    console: Console,
) -> None:
    """Print one line for each result of each point.

    A row holds the point's fields, `what`, and the metrics by group: candidate, baseline, pair,
    golden. A column is a metric of the candidate against the golden, `error_ratio`, or
    `baseline/<metric>` and `pair/<metric>` for the baseline's error and the distance of the two.
    """
    if not rows:
        return
    fixed = {k: v for k, v in rows[0]["point"].items() if k not in varied and v not in (None, ())}
    console.print(as_text("  ".join(f"{name}={value}" for name, value in fixed.items()), "dim"))
    fewer = [columns[:count] for count in range(len(columns), 0, -1)]
    place, table = first_that_fits((_points_table(rows, varied, some) for some in fewer), console)
    console.print(table)
    if place:
        left_out = ", ".join(columns[len(fewer[place]) :])
        said = f"no room in {console.width} columns for: {left_out}; --json has all"
        console.print(as_text(said, "dim"))
    caption = "against the FP64 golden; error_ratio is over the baseline's error"
    console.print(as_text(caption, "dim"))


def _points_table(
    rows: Sequence[Mapping[str, Any]], varied: Sequence[str], columns: Sequence[str]
) -> Table:
    """Return the table of `columns`, in which what tells the rows apart does not fold."""
    table = ruled_table([*varied, "what"], columns)
    for name, column in zip(varied, table.columns, strict=False):
        column.min_width = max(len(name), *(len(str(row["point"][name])) for row in rows))
    for row in rows:
        point = [str(row["point"][name]) for name in varied]
        add_row(table, *point, row["what"], *(_cell(row, name) for name in columns))
    return table


def print_waterfall(steps: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print each point's relative error of out and the gradients, with a bar of the largest."""
    results = list(steps[0]["errors"])
    for change, heading in HEADINGS.items():
        chosen = [step for step in steps if step["change"] == change]
        largest = [max(step["errors"].values()) for step in chosen]
        console.print(as_text(f"\n{heading}: relative error", "bold"))
        table = ruled_table(["point"], results)
        if change != "none":
            table.add_column("largest", no_wrap=True)
        for step, error in zip(chosen, largest, strict=True):
            errors = [_number(step["errors"][what]) for what in results]
            bar = [] if change == "none" else [_bar(error, max(largest))]
            add_row(table, step["point"] or "all", *errors, *bar)
        console.print(table)


def print_published(rows: Sequence[Mapping[str, Any]], title: str, console: Console) -> None:
    """Print published figures beside the measured ones and their ratio."""
    table = ruled_table(["row", "column"], ["published", "measured", "ratio"])
    for row in rows:
        published, measured = row["published"], row["measured"]
        ratio = f"{measured / published:.2f}x"
        add_row(table, row["row"], row["column"], _number(published), _number(measured), ratio)
    console.print(as_text(title, "bold"))
    console.print(table)


def print_ties(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """Print the signed bias of rows with two tied maxima."""
    table = ruled_table(["profile", "engine", "values"], ["bias", "+-", "mean |e|"])
    for row in rows:
        sign = "positive" if row["sign"] > 0 else "negative"
        bias, error = f"{row['bias_ulp']:+.4f}", f"{row['standard_error']:.4f}"
        add_row(
            table, row["profile"], row["engine"], sign, bias, error, f"{row['mean_abs_ulp']:.3f}"
        )
    title = "two tied maxima and small residuals: mean signed error of out, in ULPs of BF16"
    console.print(as_text(title, "bold"))
    console.print(table)


def _cell(row: Mapping[str, Any], name: str) -> str:
    group, _, metric = name.rpartition("/")
    if metric == "bias_ulp":
        found = row[group or "candidate"]
        bias, error = found["bias_ulp"], found["bias_ulp_se"]
        # where an attention fails, its errors are any number of ULPs
        if abs(bias) >= 1e3 or error >= 1e3:
            return f"{bias:+.0e} +- {error:.0e}"
        return f"{bias:+.3f} +- {error:.3f}"
    return _number(metric_of(row, name))


def metric_of(row: Mapping[str, Any], name: str) -> float:
    """Return the metric that a column is called by."""
    group, _, metric = name.rpartition("/")
    return row[group or ("golden" if metric in row["golden"] else "candidate")][metric]


def _number(value: float) -> str:
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    return f"{value:.3g}" if 1e-2 <= abs(value) < 1e4 else f"{value:.2e}"


def _bar(value: float, top: float) -> str:
    """A bar on a log scale that ends two decades below the largest."""
    if value <= 0 or top <= 0:
        return ""
    share = 1 + math.log10(value / top) / 2
    return "#" * max(1, round(BAR * max(0.0, share)))
