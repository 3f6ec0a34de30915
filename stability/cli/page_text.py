"""How `stability docs` shows a page in a terminal: in colours that any background bears."""

import re

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Markdown, TableElement
from rich.table import Table
from rich.text import Text
from rich.theme import Theme

__all__ = ["print_page"]

_THEME = Theme({"markdown.code": "bold", "markdown.h1": "bold", "markdown.h2": "bold underline"})
"""Of rich's own some are black or white, which is unseen in half of all terminals."""


class _AsItIs(CodeBlock):
    """A block of code whose lines are not broken, so that they can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(str(self.text).rstrip(), no_wrap=True, overflow="ignore")


class _Table(TableElement):
    """A table whose words go on in the next line where they are longer than their column."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for table in super().__rich_console__(console, options):
            assert isinstance(table, Table)
            for column in table.columns:
                column.overflow = "fold"
            yield table


class _Page(Markdown):
    elements = {  # noqa: RUF012
        **Markdown.elements,
        "fence": _AsItIs,
        "code_block": _AsItIs,
        "table_open": _Table,
    }


def print_page(text: str, widest: int) -> None:
    """Print Markdown in the terminal's width, or in `widest` columns if it has more."""
    console = Console(highlight=False, theme=_THEME)
    console.width = min(console.width, widest)
    # pairs of tags without words are anchors
    console.print(_Page(re.sub(r"<a [^>]*></a>", "", text), hyperlinks=False), crop=False)
