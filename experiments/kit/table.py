"""What `stability experiment` prints: the stated tests of one experiment, or all experiments.

Leaves out the page that is kept (`experiment_page`).
"""

from collections.abc import Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from experiments.kit.page import Described
from experiments.kit.record import ExperimentRecord

__all__ = ["print_experiment", "print_experiments"]


def print_experiment(each: Described, record: ExperimentRecord, console: Console) -> None:
    """Print claim, published and measured figures, and each stated test."""
    said = each.sections
    console.print(Text(f"\n{each.title} ({said['Source']})", style="bold"))
    lines = {"claim": said["Claim"], "published": said["Published"], "measured": record.measured}
    if record.explanation:
        lines["why"] = record.explanation
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, words in lines.items():
        grid.add_row(Text(name, style="dim"), Text(words))
    console.print(grid)
    table = _table("holds", "stated test", "found")
    for test in record.stated:
        statement = f"control: {test.statement}" if test.control else test.statement
        style = "" if test.holds else "bold red"
        table.add_row(
            Text("yes" if test.holds else "no", style=style), Text(statement), Text(test.found)
        )
    console.print(table, highlight=False)
    trust = "" if record.controls_hold else "; a control failed: the rest proves nothing yet"
    console.print(Text(f"agrees: {record.agrees}; {record.seconds:.0f} s{trust}", style="bold"))


def print_experiments(
    experiments: Sequence[Described],
    records: Mapping[str, Sequence[ExperimentRecord]],
    console: Console,
) -> None:
    """Print one line an experiment: its title, and whether it agrees at each size on record."""
    table = _table("experiment", "what", "agrees")
    for each in experiments:
        found = [f"{record.size}: {record.agrees}" for record in records.get(each.name, ())]
        table.add_row(each.name, Text(each.title), "\n".join(found) or "not run")
    console.print(table, highlight=False)


def _table(*names: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 2, 0, 0))
    for name in names:
        table.add_column(name, overflow="fold")
    return table
