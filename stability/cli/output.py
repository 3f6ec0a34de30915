"""How a verb answers: a line or JSON on standard output, and an exit code."""

import json
import sys
from typing import Any

from stability.records.sealed_json import jsonable
from stability.report.view.plain_text import json_escaped, readable

__all__ = [
    "EXIT_CODES",
    "EXPLORATORY",
    "FAILS",
    "HOLDS",
    "INTERRUPTED",
    "UNDECIDED",
    "UNREAD",
    "WRONG",
    "print_json",
    "print_line",
    "write_json",
]

HOLDS, FAILS, WRONG, UNDECIDED, EXPLORATORY, INTERRUPTED, UNREAD = 0, 1, 2, 3, 4, 130, 141

EXIT_CODES = {
    HOLDS: "done, and what was checked holds",
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


def print_line(text: object) -> None:
    """Print `text` as it stands, however long; a terminal obeys nothing that is in it."""
    sys.stdout.write(f"{readable(str(text))}\n")
    sys.stdout.flush()
