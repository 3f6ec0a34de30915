"""The growth laws of a study in the terminal.

Leaves out their fit (`analysis.growth_law`).
"""

import math

from rich.console import Console
from rich.table import Table

from stability.analysis.arm_growth import ArmGrowth
from stability.analysis.intervals import Interval
from stability.analysis.number_text import MISSING
from stability.report.view.plain_text import as_text

__all__ = ["growth_cells", "print_growth"]

_HEADS = ("arm", "doubles in steps", "early\nphase", "slope per step", "chaos\nfrom")


def print_growth(rows: list[ArmGrowth], console: Console) -> None:
    """Print a row for each arm that grows, the slowest to double first; nothing if none does."""
    growing = [row for row in rows if not math.isnan(row.rate.mean)]
    if not growing:
        return
    table = Table(box=None, header_style="bold")
    for head in _HEADS:
        if head == "arm":  # a name gives way, a figure is never cut
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in sorted(growing, key=lambda row: -row.doubling_time):
        table.add_row(*(as_text(cell) for cell in growth_cells(row)))
    console.print(table)
    level, seeds = growing[0].rate.level, growing[0].rate.n
    console.print(
        f"the drift's growth in its early phase, mean [{level:.0%} interval] of {seeds} seeds; "
        "slope: over the whole run.\nchaos from: the step from which an arm can't be told from "
        "the 1-ULP nudge.",
        style="dim",
        highlight=False,
        markup=False,
    )


def growth_cells(row: ArmGrowth) -> list[str]:
    """Return an arm's growth law as text: arm, doubling time, early phase, slope, chaos from."""
    first, last = row.phase
    return [
        row.arm,
        _doubling(row),
        f"{first} to {last}",
        _slope(row.slope),
        MISSING if row.lost_in_chaos is None else str(row.lost_in_chaos),
    ]


def _doubling(row: ArmGrowth) -> str:
    """Write the doubling time and its interval: `10.9 [9.9, 12.8]`; a rate of 0 never doubles."""
    if math.isnan(row.rate.low):
        return _steps(row.doubling_time)
    slowest = math.log(2) / row.rate.low if row.rate.low > 0 else math.inf
    fastest = math.log(2) / row.rate.high if row.rate.high > 0 else math.inf
    return f"{_steps(row.doubling_time)} [{_steps(fastest)}, {_steps(slowest)}]"


def _steps(count: float) -> str:
    return f"{count:.0f}" if 100 <= count < math.inf else f"{count:.3g}"


def _slope(value: Interval) -> str:
    """Write a slope and its interval with one exponent: `2.7 [2.5, 2.9]e-06`."""
    mantissa, _, exponent = f"{value.mean:.1e}".partition("e")
    if math.isnan(value.low):
        return f"{mantissa}e{exponent}"
    low, high = (f"{end / 10 ** int(exponent):.1f}" for end in (value.low, value.high))
    return f"{mantissa} [{low}, {high}]e{exponent}"
