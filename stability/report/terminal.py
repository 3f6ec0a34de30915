"""The ladder as a table in the terminal: one line an arm, what it means below.

Fits 110 columns in full; a narrower terminal gets fewer columns rather than broken ones. Leaves out
every number's origin (`analysis.ladder`) and every judgement (`analysis.sentences`).
"""

from collections.abc import Callable

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stability.analysis.intervals import replicates_needed
from stability.analysis.ladder import Ladder, Row
from stability.analysis.sentences import candidate_sentences, notes
from stability.analysis.spread import MISSING, Spread, plain, scientific, times
from stability.config.schema import BASELINE

__all__ = ["print_ladder"]

FULL_WIDTH = 124
"""From this width on the table shows W1 and the seeds' range."""
STATE_STYLE = {"finished": "", "failed": "red", "running": "cyan"}


def print_ladder(ladder: Ladder, console: Console) -> None:
    """Print the question, the table, how to read it, and what it says about the candidates."""
    full = console.width >= FULL_WIDTH
    console.print()
    console.print(Text(ladder.question, style="bold"))
    console.print()
    console.print(_table(ladder, full), highlight=False)
    console.print()
    console.print(Text(_caption(ladder, full), style="dim"), highlight=False)
    for text in candidate_sentences(ladder):
        console.print()
        console.print(Text(text))
    remarks = notes(ladder)
    if remarks:
        console.print()
    for text in remarks:
        console.print(Text(f"note: {text}", style="dim"), highlight=False)


def _table(ladder: Ladder, full: bool) -> Table:
    early, last = f"step {ladder.early_step}", f"step {ladder.last_step}"
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        show_edge=False,
        padding=(0, 2 if full else 1, 0, 0),
        expand=False,
    )
    table.add_column("arm", no_wrap=True)
    table.add_column("what changed", overflow="fold")
    table.add_column("final\nloss", justify="right", no_wrap=True)
    table.add_column(f"drift\n{early}", justify="right", no_wrap=True)
    table.add_column(f"drift\n{last}", justify="right", no_wrap=True)
    if full:
        table.add_column(f"W1\n{last}", justify="right", no_wrap=True)
    if ladder.yardstick:
        table.add_column(f"x {ladder.yardstick}\n{early}", justify="right", no_wrap=True)
        table.add_column(f"x {ladder.yardstick}\n{last}", justify="right", no_wrap=True)
    for row in ladder.rows:
        table.add_row(*_cells(ladder, row, full), style=STATE_STYLE.get(row.state, "yellow"))
    return table


def _cells(ladder: Ladder, row: Row, full: bool) -> list[Text]:
    drifts = [row.rel_l2.early, row.rel_l2.last, *([row.w1.last] if full else [])]
    ratios = [row.ratio.early, row.ratio.last] if ladder.yardstick else []
    name = Text(row.arm, style="bold" if row.axis == "attention" else "")
    change = row.change if row.state == "finished" else f"{row.change} [{row.state}]"
    cells = [name, Text(change), _cell(row.final_loss, plain, full, relative=False)]
    if row.arm == BASELINE:
        return [*cells, *(Text(MISSING) for _ in (*drifts, *ratios))]
    cells += [_cell(drift, scientific, full, relative=True) for drift in drifts]
    return cells + [_cell(ratio, times, full, relative=True) for ratio in ratios]


def _cell(spread: Spread, write: Callable[[float], str], full: bool, *, relative: bool) -> Text:
    if not spread.n:
        return Text(MISSING)
    text, interval = write(spread.mean), spread.interval
    if full and interval.low < interval.high:
        return Text(f"{text} [{write(interval.low)}, {write(interval.high)}]")
    half_range = (spread.high - spread.low) / 2
    if full and half_range > 0:
        share = 100 * half_range / abs(spread.mean) if spread.mean else 0.0
        text += f" ±{share:.0f}%" if relative else f" ±{write(half_range)}"
    return Text(text)


def _caption(ladder: Ladder, full: bool) -> str:
    seeds = f"mean of {len(ladder.seeds)} seeds" if len(ladder.seeds) > 1 else "1 seed"
    lines = [f"drift: distance from the baseline's weights, relative L2 over all of them, {seeds}."]
    if full:
        lines.append(
            "W1: 1-D Wasserstein distance of the weights' values, in units of the weights."
        )
        if len(ladder.seeds) >= replicates_needed(0.9):
            lines[-1] += " [ ]: 90% interval of the mean."
        elif len(ladder.seeds) > 1:
            lines[-1] += " ±: half of the seeds' range."
    if ladder.yardstick:
        lines.append(
            f"x {ladder.yardstick}: drift over {ladder.yardstick}'s at the same step and seed."
        )
    lines.append(f"final loss: mean of the last tenth of {ladder.steps} steps.")
    return "\n".join(lines)
