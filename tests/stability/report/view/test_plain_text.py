"""Text from files is shown as it stands: nothing of it is obeyed, and a long one stays readable."""

import pytest

from stability.report.view.plain_text import as_text, readable, shortened


@pytest.mark.parametrize("evil", ["\x1b[2J", "\x9b31m", "a\rb", "\x07", "\u202etxt", "\t"])
def test_a_terminal_obeys_no_name(evil):
    shown = as_text(f"[red]{evil}").plain
    assert evil not in shown
    assert shown.startswith("[red]")
    assert readable("π 🙂 <b> $x$") == "π 🙂 <b> $x$"


def test_the_middle_of_a_long_name_is_left_out():
    assert shortened("a" * 5 + "b" * 300 + "c" * 5, 11) == "aaaaa…ccccc"
    assert shortened("short", 5) == "short"
