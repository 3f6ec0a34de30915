"""The lines of a study in training show names and messages, and a terminal obeys none of them."""

import io

import pytest
from rich.console import Console

from stability.report.terminal.progress import StudyDisplay

ORDER = "\x1b]0;owned\x07\x1b[2J\x9b31m"
SHOWN = r"\x1b]0;owned\x07\x1b[2J\x9b31m"


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_and_messages_are_shown_and_not_obeyed(is_terminal):
    file = io.StringIO()
    console = Console(
        file=file, width=200, force_terminal=is_terminal, color_system=None, _environ={}
    )
    with StudyDisplay(console, 2) as display:
        display.run_started(1, 2, f"a[red]{ORDER}", 0, 10)
        display.run_noted(f"a[red]{ORDER}", 0, f"note {ORDER}")
        display.study_noted(f"faults on a[red]{ORDER}")
        display.run_ended(f"a[red]{ORDER}", 0, "failed", f"message {ORDER}")
    written = file.getvalue()
    assert not any(order in written for order in ("\x1b]0", "\x1b[2J", "\x07", "\x9b"))
    assert f"a[red]{SHOWN}, seed 0   note {SHOWN}" in written
    assert f"    study  faults on a[red]{SHOWN}" in written
    assert f"a[red]{SHOWN}, seed 0   message {SHOWN}" in written
