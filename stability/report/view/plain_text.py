"""What others wrote, in a terminal or a picture: shown as it stands, whatever it holds.

Names, questions and messages come from files. rich's markup in them is no markup, and a control
character, which a terminal would obey, is written out.
"""

import re

from rich.text import Text

__all__ = ["as_text", "readable", "shortened"]

# C0 but the line's end, DEL and C1; and the marks that turn the direction of writing round
_OBEYED = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def readable(words: str) -> str:
    """Return `words` with what a terminal would obey written out, e.g. an escape as `\\x1b`."""
    return _OBEYED.sub(lambda found: ascii(found.group())[1:-1], words)


def as_text(words: str, style: str = "") -> Text:
    """Return `words` for a table or a line of rich."""
    return Text(readable(words), style=style)


def shortened(words: str, most: int) -> str:
    """Return `words` in at most `most` characters: what is left out is the middle."""
    if len(words) <= most:
        return words
    tail = (most - 1) // 2
    return f"{words[: most - 1 - tail]}\N{HORIZONTAL ELLIPSIS}{words[-tail:]}"
