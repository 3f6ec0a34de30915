"""How a verb answers: a line or JSON on standard output, and an exit code."""

import json
import re
import sys
from shutil import get_terminal_size
from typing import Any, TextIO

from stability.records.sealed_json import jsonable
from stability.report.view.plain_text import in_width, json_escaped, readable

__all__ = [
    "EXIT_CODES",
    "EXPLORATORY",
    "FAILS",
    "HOLDS",
    "INTERRUPTED",
    "UNDECIDED",
    "UNREAD",
    "WRONG",
    "in_lines",
    "of_the_verb",
    "print_json",
    "print_line",
    "write_json",
]

HOLDS, FAILS, WRONG, UNDECIDED, EXPLORATORY, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = {
    HOLDS: "done, and what was checked holds (`run` has trained, whatever its answer: that is in "
    "the code of `verdict`)",
    FAILS: "a run failed, or what was checked does not hold",
    WRONG: "wrong input, or it can't be judged",
    UNDECIDED: "undecided: INCONCLUSIVE, NO ASSAY, a layer that was not seen, or a control of an "
    "experiment",
    EXPLORATORY: "exploratory: the protocol was changed after it was sealed",
    INTERRUPTED: "interrupted by Ctrl-C",
    UNREAD: "nobody read its output to the end, as in `| head`",
}
"""What each exit code says, in the words of `stability --help` and docs/study.md."""


def print_json(content: Any) -> None:
    """Print `content` as JSON; NaN and infinities, which JSON lacks, become text."""
    text = json.dumps(jsonable(content), indent=2, ensure_ascii=False, allow_nan=False)
    write_json(text + "\n")


def write_json(text: str) -> None:
    """Print JSON as it stands, but for characters that a terminal obeys: JSON escapes them too."""
    sys.stdout.write(json_escaped(text))


def print_line(text: object, *, whole: bool = False) -> None:
    """Print `text`, `whole` or as `in_lines`; a terminal obeys nothing that is in it."""
    said = readable(str(text))
    sys.stdout.write(f"{said if whole else in_lines(said, sys.stdout)}\n")
    sys.stdout.flush()


_OWN_FUNCTION = re.compile(r"^(fork|write_figure|draw_\w+|(flash|baseline|golden)_attention): ")
"""How an error begins that a function of ours raised for whoever calls it in Python."""


def of_the_verb(message: str, verb: str) -> str:
    """Return an error's message with the verb in place of a function, which nobody has typed."""
    return _OWN_FUNCTION.sub(f"{verb}: ", message)


def in_lines(text: str, to: TextIO) -> str:
    """Return `text` with no word broken at the edge of a terminal; elsewhere as it stands.

    Each line goes on below its own indent. A file or a pipe gets long lines, which others search.
    """
    if not to.isatty():
        return text
    return in_width(text, get_terminal_size().columns)
