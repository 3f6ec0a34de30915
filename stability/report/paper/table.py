"""The numbers beside a picture: one CSV file in long format, one row a point.

Numbers keep every digit. A text that a spreadsheet would run as a formula begins with an apostrophe
instead. Leaves out which numbers they are.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Table", "to_csv"]

Cell = str | int | float
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def to_csv(table: Table) -> str:
    """Return the table as CSV text with a header; lines end in a newline alone."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([_written(cell) for cell in row] for row in table.rows)
    return text.getvalue()


def _written(cell: Cell) -> str:
    if isinstance(cell, str):
        return f"'{cell}" if cell.startswith(_FORMULA) else cell
    return repr(cell)
