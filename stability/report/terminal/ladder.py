"""The ladder as a table in the terminal: one line an arm, what it means below.

A narrow terminal gets fewer columns rather than broken ones: the sparkline leaves first, then W1,
then the seeds' ranges. Leaves out every number's origin (`analysis.ladder`) and every judgement
(`analysis.ladder_sentences`).
"""

from collections.abc import Callable
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stability.analysis.intervals import replicates_needed
from stability.analysis.ladder import Ladder, Row
from stability.analysis.ladder_sentences import candidate_sentences, messages, notes
from stability.analysis.number_text import MISSING, plain, scientific, times
from stability.analysis.seed_values import SeedValues
from stability.config.schema import BASELINE
from stability.report.terminal.sparkline import DriftSparks
from stability.report.view.plain_text import as_text, shortened
from stability.report.view.whiskers import bracketed

__all__ = ["print_ladder", "spread_cell"]

CHANGE_WIDTH = 22
"""What changed gets at least this much room before any column is added that can be left out."""
ARM_WIDTH = 24
SPARK_HEAD = "drift\nby step"
STATE_STYLE = {"finished": "", "failed": "red", "running": "cyan"}


@dataclass(frozen=True, slots=True)
class _Layout:
    """The columns that can be left out."""

    ranges: bool = False
    w1: bool = False
    """With the range of the final loss."""
    sparks: bool = False


LAYOUTS = (
    _Layout(ranges=True, w1=True, sparks=True),
    _Layout(ranges=True, w1=True),
    _Layout(ranges=True, sparks=True),
    _Layout(ranges=True),
    _Layout(sparks=True),
)
"""From the widest to the narrowest but one."""


def print_ladder(ladder: Ladder, console: Console, sparks: DriftSparks | None = None) -> None:
    """Print the question, the table, how to read it, and what it says about the candidates.

    `sparks` draws each arm's drift over the steps, where there is room.
    """
    layout, table = _fitting(ladder, console, sparks)
    console.print()
    console.print(as_text(ladder.question, style="bold"))
    console.print()
    console.print(table, highlight=False)
    console.print()
    console.print(as_text(_caption(ladder, layout, sparks), style="dim"), highlight=False)
    for text in candidate_sentences(ladder):
        console.print()
        console.print(as_text(text))
    remarks = [*notes(ladder), *messages(ladder)]
    if remarks:
        console.print()
    for text in remarks:
        console.print(as_text(f"note: {text}", style="dim"), highlight=False)


def spread_cell(spread: SeedValues, write: Callable[[float], str], *, relative: bool) -> str:
    """Write a mean with its 90 % interval, else with half of the seeds' range.

    What both ends and the mean share stands once: `1.2 [1.1, 1.3]e-04`, `0.62x [0.58, 0.66]`.
    """
    text, interval = write(spread.mean), spread.interval
    if interval.low < interval.high:
        return f"{text.partition('e')[0]} {bracketed(text, interval.low, interval.high, write)}"
    half_range = (spread.high - spread.low) / 2
    if half_range > 0:
        share = 100 * half_range / abs(spread.mean) if spread.mean else 0.0
        text += f" ±{share:.0f}%" if relative else f" ±{write(half_range)}"
    return text


def _fitting(ladder: Ladder, console: Console, sparks: DriftSparks | None) -> tuple[_Layout, Table]:
    unlimited = console.options.update(max_width=10_000)
    for layout in LAYOUTS:
        if layout.sparks and sparks is None:
            continue
        table = _table(ladder, layout, sparks)
        if Measurement.get(console, unlimited, table).minimum <= console.width:
            return layout, table
    return _Layout(), _table(ladder, _Layout(), sparks)


def _table(ladder: Ladder, layout: _Layout, sparks: DriftSparks | None) -> Table:
    rows = [_cells(ladder, row, layout, sparks) for row in ladder.rows]
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 2 if layout.w1 else 1, 0, 0),
        expand=False,
    )
    # names give way; a figure's column is as wide as its widest cell, so that none is cut
    roomy = layout != _Layout()
    arms = min(ARM_WIDTH, max(cells[0].cell_len for cells in rows)) if roomy else None
    table.add_column("arm", overflow="fold", min_width=arms)
    table.add_column("what changed", overflow="fold", min_width=CHANGE_WIDTH if roomy else None)
    for place, head in enumerate(_heads(ladder, layout), start=2):
        cells = [*Text(head).split("\n"), *(cells[place] for cells in rows)]
        width = max(cell.cell_len for cell in cells)
        justify = "left" if head == SPARK_HEAD else "right"
        table.add_column(as_text(head), justify=justify, no_wrap=True, min_width=width)
    for row, cells in zip(ladder.rows, rows, strict=True):
        table.add_row(*cells, style=STATE_STYLE.get(row.state, "yellow"))
    return table


def _heads(ladder: Ladder, layout: _Layout) -> list[str]:
    early, last = f"step {ladder.early_step}", f"step {ladder.last_step}"
    heads = ["final\nloss", f"drift\n{early}", f"drift\n{last}"]
    heads += [f"W1\n{last}"] if layout.w1 else []
    if ladder.yardstick:
        name = shortened(ladder.yardstick, ARM_WIDTH)
        heads += [f"x {name}\n{early}", f"x {name}\n{last}"]
    return [*heads, *([SPARK_HEAD] if layout.sparks else [])]


def _cells(ladder: Ladder, row: Row, layout: _Layout, sparks: DriftSparks | None) -> list[Text]:
    drifts = [row.rel_l2.early, row.rel_l2.last, *([row.w1.last] if layout.w1 else [])]
    ratios = [row.ratio.early, row.ratio.last] if ladder.yardstick else []
    name = as_text(row.arm, style="bold" if row.axis == "attention" else "")
    change = row.change if row.state == "finished" else f"{row.change} [{row.state}]"
    cells = [name, as_text(change), _cell(row.final_loss, plain, layout.w1, relative=False)]
    drawn = [Text(sparks.line(row.arm))] if layout.sparks and sparks else []
    if row.arm == BASELINE:
        return [*cells, *(Text(MISSING) for _ in (*drifts, *ratios)), *drawn]
    cells += [_cell(drift, scientific, layout.ranges, relative=True) for drift in drifts]
    cells += [_cell(ratio, times, layout.ranges, relative=True) for ratio in ratios]
    return [*cells, *drawn]


def _cell(
    spread: SeedValues, write: Callable[[float], str], with_range: bool, *, relative: bool
) -> Text:
    if not spread.n:
        return Text(MISSING)
    return Text(spread_cell(spread, write, relative=relative) if with_range else write(spread.mean))


def _caption(ladder: Ladder, layout: _Layout, sparks: DriftSparks | None) -> str:
    seeds = f"mean of {len(ladder.seeds)} seeds" if len(ladder.seeds) > 1 else "1 seed"
    lines = [f"drift: distance from the baseline's weights, relative L2 over all of them, {seeds}."]
    if layout.w1:
        lines.append(
            "W1: 1-D Wasserstein distance of the weights' values, in units of the weights."
        )
    if layout.ranges and len(ladder.seeds) >= replicates_needed(0.9):
        lines[-1] += " [ ]: 90% interval of the mean."
    elif layout.ranges and len(ladder.seeds) > 1:
        lines[-1] += " ±: half of the seeds' range."
    if ladder.yardstick:
        lines.append(
            f"x {ladder.yardstick}: drift over {ladder.yardstick}'s at the same step and seed."
        )
    if layout.sparks and sparks:
        lines.append(sparks.caption())
    lines.append(f"final loss: mean of the last tenth of {ladder.steps} steps.")
    return "\n".join(lines)
