"""The one form in which every level of evidence says what it has found."""

import re

from stability.analysis.evidence import LEVELS, LevelEvidence

__all__ = ["check_form"]

FORM = re.compile(r"[A-Z][^[]+ \[[^],]+, [^],]+\] .*\(limit [^)]+\).*\.")


def check_form(found: LevelEvidence) -> None:
    """Assert that a finding is plain sentences with a place, a figure, its interval and limit."""
    assert FORM.fullmatch(found.sentence), found.sentence
    assert not found.sentence.lower().startswith(tuple(f"{level}:" for level in LEVELS))
    decides = f" To decide it: {found.decides}." if found.decides else ""
    assert found.text == f"{found.sentence}{decides}"
    assert (found.state == "undecided") == bool(found.decides)
