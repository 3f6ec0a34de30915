"""Tables fit the terminal: columns leave, names fold, and no figure is ever cut."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from stability.report.terminal import tables
from stability.report.terminal.tables import add_row, first_that_fits, plain_table, ruled_table

FIGURES = ["1.2e-03 ±4%", "0.62x", "1.234"]
NAME = "blocks.layer_1.attention_residual.weight"


def fitted(width):
    def table(count):
        made = ruled_table(["name"], FIGURES[:count], gap=2)
        made.columns[0].min_width = len(NAME)
        add_row(made, NAME, *FIGURES[:count])
        return made

    console = Console(width=width, file=io.StringIO(), force_terminal=False)
    place, chosen = first_that_fits(map(table, (3, 2, 1)), console)
    console.print(chosen)
    return place, console.file.getvalue()


@pytest.mark.parametrize(("width", "place"), [(90, 0), (70, 0), (69, 1), (61, 2), (30, 2)])
def test_columns_leave_then_names_fold_and_figures_stay_whole(width, place):
    found, text = fitted(width)
    assert found == place
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    *_, first = [line for line in text.splitlines() if "±" in line]
    assert [figure in first for figure in FIGURES] == [count < 3 - place for count in range(3)]
    assert "…" not in text
    if width >= 54:
        assert NAME in text


def test_cells_and_headings_are_text(capsys):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    for build in (ruled_table, plain_table):
        table = build(["[red]name"], ["[b]"])
        add_row(table, "[bold]x\x1b[31m", "[dim]1", style="bold")
        console.print(table)
    assert console.file.getvalue().count("[bold]x\\x1b[31m") == 2
    assert console.file.getvalue().count("[red]name") == 2


# what terminals show as the named colours: xterm, Terminal of macOS, Tango (GNOME)
SHOWN_AS = {
    "green": ("00cd00", "00a600", "4e9a06"),
    "red": ("cd0000", "990000", "cc0000"),
    "yellow": ("cdcd00", "999900", "c4a000"),
    "bright_white": ("ffffff", "e6e6e6", "eeeeec"),
    "black": ("000000", "000000", "2e3436"),
}


def luminance(colour):
    parts = (int(colour[at : at + 2], 16) / 255 for at in (0, 2, 4))
    red, green, blue = (x / 12.92 if x <= 0.03928 else ((x + 0.055) / 1.055) ** 2.4 for x in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(a, b):
    darker, lighter = sorted((luminance(a), luminance(b)))
    return (lighter + 0.05) / (darker + 0.05)


@pytest.mark.parametrize("style", [tables.FINE, tables.BAD])
def test_words_can_be_read_on_black_and_on_white(style):
    """Yellow and cyan have 1.7 and 2.0 on white, blue 1.6 on black."""
    worst = min(contrast(c, ground) for c in SHOWN_AS[style] for ground in ("000000", "ffffff"))
    assert worst > 2.1


@pytest.mark.parametrize("style", [tables.FINE_BADGE, tables.OPEN_BADGE, tables.BAD_BADGE])
def test_badges_can_be_read_whatever_the_ground(style):
    pairs = zip(*(SHOWN_AS[name] for name in style.split(" on ")), strict=True)
    assert min(contrast(*pair) for pair in pairs) > 3.4


def test_no_other_colour_is_written_in():
    sources = Path(tables.__file__).parent.glob("*.py")
    found = [
        path.name for path in sources if re.search(r"yellow|cyan|blue|magenta", path.read_text())
    ]
    assert found == ["tables.py"]
