"""The growth laws of a study in the terminal.

Leaves out their fit (`analysis.growth_law`).
"""

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.growth_law import ArmGrowth
from stability.analysis.intervals import Interval
from stability.analysis.spread import MISSING

__all__ = ["print_growth"]

_HEADS = (
    "arm",
    "doubles in\nsteps",
    "growth\nper step",
    "in steps",
    "slope\nper step",
    "chaos\nfrom",
)


def print_growth(rows: list[ArmGrowth], console: Console) -> None:
    """Print a row for each arm that grows, the slowest to double first; nothing if none does."""
    growing = [row for row in rows if not math.isnan(row.rate.mean)]
    if not growing:
        return
    table = Table(box=None, header_style="bold")
    for head in _HEADS:
        table.add_column(head, justify="left" if head == "arm" else "right", no_wrap=True)
    for row in sorted(growing, key=lambda row: -row.doubling_time):
        table.add_row(*(Text(cell) for cell in _cells(row)))
    console.print(table)
    level, seeds = growing[0].rate.level, growing[0].rate.n
    console.print(
        f"growth of the drift in its early phase, mean [{level:.0%} interval] of {seeds} seeds; "
        "slope: over the whole run.\nchaos from: the step from which an arm can't be told from "
        "the 1-ULP nudge.",
        style="dim",
        highlight=False,
        markup=False,
    )


def _cells(row: ArmGrowth) -> list[str]:
    first, last = row.phase
    return [
        row.arm,
        f"{row.doubling_time:.3g}",
        _interval(row.rate, ".2g"),
        f"{first} to {last}",
        _interval(row.slope, ".1e"),
        MISSING if row.lost_in_chaos is None else str(row.lost_in_chaos),
    ]


def _interval(value: Interval, form: str) -> str:
    if math.isnan(value.low):
        return f"{value.mean:{form}}"
    return f"{value.mean:{form}} [{value.low:{form}}, {value.high:{form}}]"
