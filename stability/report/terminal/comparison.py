"""What `stability compare` prints: a row for all weights, the parameters that moved most, the rest.

A narrow terminal gets fewer columns. Leaves out what was compared with what
(`analysis.weight_comparison`).
"""

import math
from collections.abc import Callable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.number_text import scientific
from stability.analysis.weight_comparison import WeightComparison
from stability.metrics.drift import ALL

__all__ = ["print_comparison"]

COLUMNS = {
    "rel_l2": "rel_l2",
    "w1": "w1",
    "max_abs": "max_abs",
    "cosine": "cosine",
    "w1_over_std": "w1\nover_std",
    "mean_abs": "mean_abs",
    "sign_flips": "sign\nflips",
}
"""The metrics of `metrics.drift`, what matters first, with the heads of their columns."""
NAME_WIDTH = 40
"""Longer names are folded rather than that a column is left out."""
LISTED = 8

CAPTION = """\
rel_l2: |a - b| / |b|. w1: 1-D Wasserstein distance, blind to position;
over_std: over b's spread. sign flips: share of values that change sign."""


def print_comparison(found: WeightComparison, top: int, console: Console) -> None:
    """Print "all", the `top` parameters of the largest `rel_l2`, and what was not compared."""
    moved = sorted((name for name in found.drifts if name != ALL), key=_by_rel_l2(found))
    console.print()
    console.print(Text(found.a, style="bold"))
    console.print(Text(f"against {found.b}", style="bold"))
    console.print()
    console.print(_fitting_table(found, [ALL, *moved[:top]], console), highlight=False)
    if left_out := moved[top:]:
        largest = scientific(found.drifts[left_out[0]]["rel_l2"])
        text = f"{_count(left_out, 'more parameter')} of at most rel_l2 {largest}: see --top"
        console.print(Text(text), highlight=False)
    console.print()
    for line in _differences(found):
        console.print(Text(line), highlight=False)
    console.print(Text(CAPTION, style="dim"), highlight=False)


def _by_rel_l2(found: WeightComparison) -> Callable[[str], tuple[bool, float]]:
    """Return the key that sorts by falling `rel_l2`, NaN before all."""

    def key(name: str) -> tuple[bool, float]:
        value = found.drifts[name]["rel_l2"]
        return (False, 0.0) if math.isnan(value) else (True, -value)

    return key


def _fitting_table(found: WeightComparison, names: Sequence[str], console: Console) -> Table:
    """Return the table with as many columns as the terminal has room for."""
    metrics = list(COLUMNS)
    longest = min(NAME_WIDTH, max(len(name) for name in names))
    unlimited = console.options.update(max_width=10_000)
    table = _table(found, names, metrics, longest)
    while len(metrics) > 1 and console.measure(table, options=unlimited).maximum > console.width:
        metrics.pop()
        table = _table(found, names, metrics, longest)
    return table


def _table(
    found: WeightComparison, names: Sequence[str], metrics: Sequence[str], width: int
) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0), expand=False
    )
    table.add_column("parameter", overflow="fold", width=max(width, len("parameter")))
    for metric in metrics:
        table.add_column(COLUMNS[metric], justify="right", no_wrap=True)
    for name in names:
        cells = [_cell(metric, found.drifts[name][metric]) for metric in metrics]
        table.add_row(name, *cells, style="bold" if name == ALL else "")
    return table


def _cell(metric: str, value: float) -> str:
    if metric == "cosine" and math.isfinite(value):
        return "1 (exact)" if value == 1 else f"{value:.6f}"
    return scientific(value)


def _differences(found: WeightComparison) -> Iterator[str]:
    """Yield a line for each kind of difference, with the first names of it."""
    shapes = [f"{name} {a} and {b}" for name, (a, b) in found.shapes_differ.items()]
    reasons = [f"{name} ({reason})" for name, reason in found.not_compared.items()]
    for kind, names in (
        ("only in a", found.only_in_a),
        ("only in b", found.only_in_b),
        ("of different shapes", shapes),
        ("not comparable", reasons),
    ):
        if names:
            more = f", and {len(names) - LISTED} more: see --json" if len(names) > LISTED else ""
            yield f"{_count(names, 'name')} {kind}: {', '.join(names[:LISTED])}{more}"


def _count(names: Sequence[str], noun: str) -> str:
    return f"{len(names)} {noun}{'s' if len(names) != 1 else ''}"
