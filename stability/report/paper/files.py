"""The two files of a figure: the picture, and the numbers that it shows as CSV beside it.

The numbers are in long format, one row a point, and keep every digit. A text that a spreadsheet
would run as a formula gets an apostrophe in front. Leaves out which numbers they are.
"""

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from stability.records.atomic_files import write_text, write_whole

__all__ = ["Cell", "Table", "picture_bytes", "to_csv", "write_files"]

Cell = str | int | float
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")
_NO_DATES = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[Cell, ...]]


def write_files(path: Path, figure: Figure, table: Table) -> Path:
    """Write the picture to `path`, whose suffix is one of FORMATS, and return the numbers' path."""
    picture = picture_bytes(figure, path.suffix[1:])
    numbers = path.with_suffix(".csv")
    write_text(numbers, to_csv(table))
    write_whole(path, lambda temporary: temporary.write_bytes(picture))
    return numbers


def picture_bytes(figure: Figure, file_format: str) -> bytes:
    """Return the picture as a file's bytes, the same for the same figure."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=file_format, metadata=_NO_DATES[file_format])
    return buffer.getvalue()


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
