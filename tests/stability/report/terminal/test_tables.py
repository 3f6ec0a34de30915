"""Tables fit the terminal: columns leave, names fold, and no figure is ever cut."""

import io

import pytest
from rich.console import Console

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
