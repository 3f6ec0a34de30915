"""Tables of rich with two kinds of columns: names, which fold, and numbers, which are never cut.

Every cell and heading is plain text, whatever markup or control character it holds. The styles of
words that are good, bad or open stand here too, the same in every table.
"""

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from stability.report.view.plain_text import as_text

__all__ = [
    "ALARM",
    "BAD",
    "BAD_BADGE",
    "FINE",
    "FINE_BADGE",
    "OPEN",
    "OPEN_BADGE",
    "add_names",
    "add_numbers",
    "add_row",
    "first_that_fits",
    "plain_table",
    "ruled_table",
]

# Nobody knows the ground that a terminal writes on: yellow, cyan and bold green can't be read on
# white, blue not on black, and magenta is the red of some themes. Any of them can below black.
FINE, OPEN, BAD, ALARM = "green", "bold", "red", "bold red"
FINE_BADGE, OPEN_BADGE, BAD_BADGE = "black on green", "black on yellow", "bright_white on red"


def ruled_table(names: Sequence[str], numbers: Sequence[str], *, gap: int = 1) -> Table:
    """Return a table with a rule below its headings, its columns `gap` spaces apart."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, gap, 0, 0))
    add_names(table, *names)
    add_numbers(table, *numbers)
    return table


def plain_table(names: Sequence[str], numbers: Sequence[str]) -> Table:
    """Return a table without a rule and with bold headings."""
    table = Table(box=None, header_style="bold")
    add_names(table, *names)
    add_numbers(table, *numbers)
    return table


def add_names(table: Table, *heads: str) -> None:
    """Add a column of names for each heading: flush left, folded where there is no room."""
    for head in heads:
        table.add_column(as_text(head), overflow="fold")


def add_numbers(table: Table, *heads: str) -> None:
    """Add a column of numbers for each heading: flush right, each in one line."""
    for head in heads:
        table.add_column(as_text(head), justify="right", no_wrap=True)


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add a row; a cell that is a string is shown as it stands."""
    texts = (as_text(cell) if isinstance(cell, str) else cell for cell in cells)
    table.add_row(*texts, style=style)


def first_that_fits(tables: Iterable[Table], console: Console) -> tuple[int, Table]:
    """Return the first of `tables` that shows every figure whole on the console, and its place.

    If none does it is the last one, in which names are as narrow as need be.
    """
    unlimited = console.options.update(max_width=10_000)
    place, table = 0, Table()
    for place, table in enumerate(tables):
        _hold_numbers(table)
        if Measurement.get(console, unlimited, table).minimum <= console.width:
            return place, table
    for column in table.columns:
        if not column.no_wrap:
            column.width = column.min_width = None
    return place, table


def _hold_numbers(table: Table) -> None:
    """Make each column that does not fold as wide as its widest cell, so that none is cut."""
    for column in table.columns:
        if column.no_wrap:
            cells = [cell for cell in (column.header, *column.cells) if isinstance(cell, Text)]
            column.min_width = max(line.cell_len for cell in cells for line in cell.split("\n"))
