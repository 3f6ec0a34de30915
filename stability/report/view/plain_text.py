"""Text that comes from files, shown in a terminal or a picture as it stands.

Names, questions and messages may hold anything. Square brackets in them are no markup of rich, and
a control character, which a terminal would obey, is written out as its escape.
"""

import re
import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["as_markup", "as_text", "in_width", "json_escaped", "readable", "shortened"]

# the control characters C0 (but for the line feed), DEL and C1, and Unicode's marks that turn the
# direction of writing round
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def readable(words: str) -> str:
    """Return `words` with each control character written as its escape, e.g. `\\x1b`."""
    return _OBEYED.sub(lambda found: ascii(found.group())[1:-1], words)


def json_escaped(text: str) -> str:
    """Return JSON text that says the same, with each control character escaped as JSON does."""
    return _OBEYED.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def in_width(text: str, width: int) -> str:
    """Return `text` in lines of at most `width` columns; no word is broken, however long it is.

    Each line goes on below its own indent.
    """
    return "\n".join(_line_in_width(line, width) for line in text.split("\n"))


def _line_in_width(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    if len(line) <= width or len(indent) > width // 2:
        return line
    # the indent apart: before a word that has no room it would be left out
    return textwrap.fill(
        line[len(indent) :],
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def as_markup(words: str) -> str:
    """Return `words` as they stand within rich's markup."""
    from rich.markup import escape  # heavy, as below: a line of plain output needs none of it

    return escape(readable(words))


def as_text(words: str, style: str = "") -> "Text":
    """Return `words` as a text of rich, for a cell of a table or a line."""
    from rich.text import Text

    return Text(readable(words), style=style)


def shortened(words: str, most: int) -> str:
    """Return `words` in at most `most` characters; an ellipsis stands for the middle."""
    if len(words) <= most:
        return words
    tail = (most - 1) // 2
    return f"{words[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{words[-tail:]}"
